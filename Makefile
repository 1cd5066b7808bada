# Every target makes .venv first where it is missing; all that is needed is Python 3.11 and pip.
PYTHON ?= python3
TEST_ARGS ?=
WORKERS ?= 2
BIN := .venv/bin
BENCHMARKS := $(sort $(wildcard benchmarks/[!_]*.py))
# Workers take whole files, those that take longest first: tests/conftest.py orders them.
XDIST := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast lint bench clean

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

# The C++ part is compiled while the first result is made and read.
demo: .venv/.usable  ## See the collectives of a step, then decode with a small Llama on 2 local ranks
	@$(BIN)/fcoll build >/dev/null & \
	shown="$$($(BIN)/fcoll report --quiet --demo tiny --mesh dp=2,tp=2 --top 5)" && echo "$$shown" && \
	wait && $(BIN)/python examples/tp_llama.py

test: .venv/.installed  ## Run the tests; more arguments for pytest in TEST_ARGS="-k ranks -x"
	@$(BIN)/fcoll build >/dev/null || true  # before a test's time is counted
	$(BIN)/python -m pytest tests $(XDIST) $(TEST_ARGS)

test-fast: .venv/.installed  ## The tests that need no ranks, compiler or second process
	$(BIN)/python -m pytest tests $(XDIST) -m fast $(TEST_ARGS)

lint: .venv/.installed  ## ruff (lint and format) and mypy; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/.installed  ## Run every benchmark in benchmarks/
	@set -e; for file in $(BENCHMARKS); do echo "== $$file"; $(BIN)/python $$file; done

clean:  ## Remove caches and build products; keeps .venv
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

# torch first and alone: pinned there, it is the CPU build where one is offered, and the second
# step finds it installed and downloads nothing more of its size.
.venv/.usable: pyproject.toml
	@echo "installing torch (about a minute) ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet torch==2.13.0
	@echo "installing fcoll ..."
	@$(BIN)/python -m pip install --quiet --editable .
	@touch $@

.venv/.installed: .venv/.usable
	@echo "installing the tools of developers ..."
	@$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@
