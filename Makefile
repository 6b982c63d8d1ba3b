# make demo: see Quire work.  make test: all checks.  make help: the rest.
# A first run makes .venv; PYTHON=python3.12 picks the interpreter (3.11 to 3.13). TESTS=... narrows the tests.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
TESTS ?=
VENV := .venv
BIN := $(VENV)/bin
STEP := .ci/step
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq install

# Stamps are written only when all of an installation has succeeded. BEGUN is there while one runs: if it is
# found at the start, the last one was interrupted, and what it left is thrown away.
RUNTIME := $(VENV)/runtime.stamp
DEV := $(VENV)/dev.stamp
BEGUN := $(VENV)/begun.stamp

.PHONY: help demo test test-slow bench format clean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(RUNTIME)  ## complete a batch of prompts with the model that ships with Quire
	@$(BIN)/quire generate --demo

test: $(DEV)  ## formatting, lint, types, import contract, and all tests but the slow ones
	@$(STEP) "Formatting (ruff format)" $(BIN)/ruff format --check --output-format concise .
	@$(STEP) "Lint (ruff)" $(BIN)/ruff check .
	@$(STEP) "Types (mypy)" $(BIN)/mypy
	@$(STEP) "Import contract (import-linter)" $(BIN)/lint-imports --no-cache
	@$(STEP) "Without asserts (python -O)" $(BIN)/python -O -m quire.cli.main generate demo \
	    "def add(a, b):" --max-tokens 8 --temperature 0 --quiet
	@$(STEP) "Tests (pytest)" $(BIN)/python -m pytest $(TESTS)

test-slow: $(DEV)  ## the slow tests
	@$(STEP) "Slow tests (pytest)" $(BIN)/python -m pytest -m slow $(TESTS)

bench: $(DEV)  ## measure all tables of benchmarks/README.md, and write them there (some 20 minutes, on a quiet machine)
	@$(BIN)/python benchmarks/run_all.py --write

format: $(DEV)  ## put the sources into the house's format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:  ## remove .venv and every cache
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUNTIME): requirements/runtime.txt requirements/torch.txt pyproject.toml
	@if [ -e $(BEGUN) ]; then echo "The last installation was interrupted; starting over."; rm -rf $(VENV); fi
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else \
	    "Quire needs Python 3.11 to 3.13, and $(PYTHON) is %d.%d; try: make PYTHON=python3.12" % v)'
	@mkdir -p $(VENV) && touch $(BEGUN)
	@[ -x $(BIN)/python ] || $(STEP) "Making $(VENV) with $(PYTHON)" $(PYTHON) -m venv $(VENV)
	@$(STEP) "Installing dependencies" $(PIP) --no-deps -r requirements/runtime.txt
	@$(STEP) "Installing torch (CPU)" $(PIP) --retries 1 -r requirements/torch.txt -c requirements/runtime.txt
	@$(STEP) "Installing Quire" $(PIP) --no-deps --no-build-isolation -e .
	@rm $(BEGUN) && touch $@

$(DEV): $(RUNTIME) requirements/dev.txt
	@if [ -e $(BEGUN) ]; then rm -f $(RUNTIME); $(MAKE) --no-print-directory $(RUNTIME); fi
	@touch $(BEGUN)
	@$(STEP) "Installing what the tests need" $(PIP) --no-deps -r requirements/dev.txt
	@$(STEP) "Checking versions" $(BIN)/python -m pip --disable-pip-version-check check
	@rm $(BEGUN) && touch $@
