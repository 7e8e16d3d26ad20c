# make demo    set up and run the main job: the A/B of registry.yaml, parity and forecast with no GPU
# make test    set up and pass the tests
# make test-full, make test-peers, make lint, make clean

PYTHON ?= python3
BIN := .venv/bin
# The CUDA compiler comes as wheels, which macOS has not: everything but compilation and GPUs runs there.
COMPILER := $(if $(filter Darwin,$(shell uname -s)),,cu13)
comma := ,

.PHONY: demo test test-full test-peers lint clean

demo: .venv/.run
	$(BIN)/atlas-lab ab

test: .venv/.dev lint
	$(BIN)/python -m pytest -n 2 -q

test-full: .venv/.dev lint
	$(BIN)/python -m pytest -n 2 -q --hypothesis-profile=thorough --full

test-peers: .venv/.peers
	$(BIN)/python -m pytest -n 2 -q -m peers

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.run: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install -q -e '.$(if $(COMPILER),[$(COMPILER)])'
	touch $@

.venv/.dev: .venv/bin/python pyproject.toml
	$(BIN)/python -m pip install -q -e '.[$(if $(COMPILER),$(COMPILER)$(comma))dev]'
	touch $@

.venv/.peers: .venv/.dev
	$(BIN)/python -m pip install -q -e '.[peers,dev]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
