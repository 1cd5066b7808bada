# Every target makes .venv first where it is missing; all that is needed is Python 3.11 and pip.
PYTHON ?= python3
TEST_ARGS ?=
WORKERS ?= 2
# Another version has a venv of its own, as in `make test TORCH=2.15.0`. Of the newer ones pip may
# find no CPU build: they bring 6 GB of CUDA libraries, which they cannot be imported without.
TORCH ?= 2.13.0
VENV := .venv$(if $(filter-out 2.13.0,$(TORCH)),-$(TORCH))
BIN := $(VENV)/bin
BENCHMARKS := $(sort $(wildcard benchmarks/[!_]*.py))
# Workers take whole files, those that take longest first: tests/conftest.py orders them.
XDIST ?= -n $(WORKERS) --dist loadfile --no-loadscope-reorder
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# So that modules of torch are compiled once, when they are first imported: pip, which would compile
# all of them, takes 14 s for it.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast lint bench clean

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

# The C++ part is compiled while the first result is made and read, and the model without collectives
# is compiled; the ranks wait for it at their first collective.
demo: $(VENV)/.usable  ## See the collectives of a step, then decode with a small Llama on 2 local ranks
	@$(BIN)/fcoll build >/dev/null & \
	shown="$$($(BIN)/fcoll report --quiet --demo tiny --mesh dp=2,tp=2 --top 5)" && echo "$$shown" && \
	$(BIN)/python examples/tp_llama.py

# The C++ part is compiled while the tools are installed, before a test's time is counted.
test: $(VENV)/.usable  ## Run the tests; TEST_ARGS="-k ranks -x" for pytest, TORCH=2.15.0 for another torch
	@$(BIN)/python -m fcoll build >/dev/null & $(MAKE) -s $(VENV)/.installed && wait
	$(BIN)/python -m pytest tests $(XDIST) $(TEST_ARGS)

test-fast: $(VENV)/.installed  ## The tests that need no ranks, compiler or second process
	$(BIN)/python -m pytest tests $(XDIST) -m fast $(TEST_ARGS)

lint: $(VENV)/.installed  ## ruff (lint and format) and mypy; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed  ## Run every benchmark in benchmarks/
	@set -e; for file in $(BENCHMARKS); do echo "== $$file"; $(BIN)/python $$file; done

clean:  ## Remove caches and build products; keeps .venv*
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

# torch first and alone: pinned there, it is the CPU build where one is offered, and the second
# step finds it installed and downloads nothing more of its size.
$(VENV)/.usable: pyproject.toml
	@echo "installing torch $(TORCH) (about a minute) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --no-compile torch==$(TORCH)
	@echo "installing fcoll ..."
	@$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed: $(VENV)/.usable
	@echo "installing the tools of developers ..."
	@$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@
