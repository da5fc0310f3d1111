# Four verbs. PYTHON is the interpreter that makes the environment; VENV is where it goes.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Two matrix-product threads on a busy two-core machine spin on each other.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test check serve

# The whole way on a real model: read, store, restart, fetch, answer.
demo: $(VENV)/.installed
	$(BIN)/kvtcd demo

# Everything that must hold: style, types, import contracts, all tests.
test: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest

# The fast lane: the same without what needs a real model or more than a few seconds.
check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -m "not slow and not model"

# A daemon with the configuration of ./config.toml, or the example's defaults under ./.cache.
serve: $(VENV)/.installed
	$(BIN)/kvtcd serve $(if $(wildcard config.toml),--config config.toml,--config .ci/serve.toml)

$(VENV)/.installed: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable '.[test]'
	touch $@
