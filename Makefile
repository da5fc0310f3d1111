# Seven verbs. PYTHON is the interpreter that makes the environment; VENV is where it goes, PEERS and RIVALS those of test-peers.
PYTHON ?= python3
VENV ?= .venv
PEERS ?= .cache/peers
RIVALS ?= .cache/rivals
BIN := $(VENV)/bin
# Two matrix-product threads on a busy two-core machine spin on each other.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-peers check soak fuzz serve

# The whole way on a real model: read, store, restart, fetch, answer.
demo: $(VENV)/.installed
	$(BIN)/kvtcd demo

# Everything that must hold: style, types, import contracts, all tests.
# What it says depends on the code alone: one order of the tests, one seed, the same examples. `pytest` by itself varies them.
# In which order threads and processes get on is the machine's alone: what fails is run once more, both runs are shown, and
# what fails again has failed. What fails the first time only is a defect, too, of the test or of the program.
# What hangs ends after `timeout` of pyproject.toml; what not even a signal ends, after half an hour: with a trace, both.
GATE := --randomly-seed=1 -o faulthandler_timeout=1800 -o faulthandler_exit_on_timeout=true
test test-peers: export HYPOTHESIS_PROFILE = gate
test test-peers: export PYTHONHASHSEED = 1
test: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest $(GATE) || { test $$? -eq 1 && $(BIN)/pytest $(GATE) --last-failed; }

# The same against real serving frameworks, in an environment of their own (4 GB, some minutes the first time),
# and against kvpress, in another that the tests start (1.4 GB).
# Inside an engine a lookup has a deadline and then is a miss, which a machine that stands still for a moment makes of a hit.
test-peers: $(PEERS)/.installed $(RIVALS)/.installed $(VENV)/.installed
	KVTCD_RIVALS=$(abspath $(RIVALS))/bin/python $(BIN)/pytest $(GATE) tests/lab/test_eviction.py
	$(PEERS)/bin/python -m pytest $(GATE) tests/peers || \
	{ test $$? -eq 1 && $(PEERS)/bin/python -m pytest $(GATE) --last-failed tests/peers; }

# The fast lane: the same without what needs a real model or more than a few seconds.
check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -m "not slow and not model"

# Mixed traffic for three quarters of an hour: does anything grow, leak or differ? MINUTES is how long.
soak: $(VENV)/.installed
	PYTHONPATH=tests $(BIN)/python -m soak $(if $(MINUTES),--minutes $(MINUTES))

# The nightly preset: 50,000 requests made up from the OpenAPI document, and 5,000 examples a test of formats and files; random.
# It takes hours; FUZZ names files or tests for a part of it. No test is ended for taking long.
FUZZ := tests/api/test_schema.py tests/core tests/codec/test_golden.py tests/codec/test_profile.py tests/test_readers.py
fuzz: $(VENV)/.installed
	HYPOTHESIS_PROFILE=nightly $(BIN)/pytest --timeout=0 $(FUZZ)

# A daemon with the configuration of ./config.toml, or the example's defaults under ./.cache.
serve: $(VENV)/.installed
	$(BIN)/kvtcd serve $(if $(wildcard config.toml),--config config.toml,--config .ci/serve.toml)

$(VENV)/.installed: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable '.[test]'
	touch $@

$(RIVALS)/.installed: tests/peers/rivals.txt
	$(PYTHON) -m venv $(RIVALS)
	$(RIVALS)/bin/python -m pip install --quiet --requirement tests/peers/rivals.txt
	touch $@

$(PEERS)/.installed: pyproject.toml tests/peers/requirements.txt tests/peers/frameworks.txt tests/peers/constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --upgrade pip
	$(PEERS)/bin/python -m pip install --quiet --constraint tests/peers/constraints.txt torch
	$(PEERS)/bin/python -m pip install --quiet --constraint tests/peers/constraints.txt --requirement tests/peers/requirements.txt
	$(PEERS)/bin/python -m pip install --quiet --no-deps --requirement tests/peers/frameworks.txt
	$(PEERS)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@
