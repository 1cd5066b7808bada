# Every target makes .venv first where it is missing; all that is needed is Python 3.11 and pip.
PYTHON ?= python3
TEST_ARGS ?=
BIN := .venv/bin
BENCHMARKS := $(sort $(wildcard benchmarks/[!_]*.py))
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench clean

help:  ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 8

demo: .venv/.installed  ## Decode with a small tensor-parallel Llama on 2 local ranks: examples/tp_llama.py
	$(BIN)/python examples/tp_llama.py

test: .venv/.installed  ## Run the tests; more arguments for pytest in TEST_ARGS="-k ranks -x"
	$(BIN)/python -m pytest tests $(TEST_ARGS)

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
.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
