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
QUIRE := $(VENV)/quire.stamp
DEV := $(VENV)/dev.stamp
BEGUN := $(VENV)/begun.stamp

KERNELS := src/quire/ops/cpu
# Where kernels are compiled to be tested in another form than the installed one.
SANITIZED := build/sanitize
# What makes mutants: not in .venv, since nothing else needs it.
OPERATORS := build/mutants
# Tests that neither talk to other processes nor look at a clock: they may run beside one another.
COMPUTE := tests/core $(filter-out tests/test_cpu_library.py,$(wildcard $(patsubst %,tests/test_%.py,\
    cpu_* triton_* models_* ops* quantization* sampling_* determinism experts latent* layers device* engine_properties \
    memory_plan runner_batch checkpoint_* chat_template tokenizer config recorder timeline speculation* trees demo_* \
    gpu_check)))
KERNEL_TESTS = $(or $(TESTS),tests/test_cpu_*.py tests/test_ops*.py)

.PHONY: help demo test test-slow test-arm mutants sanitize bench bench-peers gpu-check gpu-bundle format clean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(QUIRE)  ## complete a batch of prompts with the model that ships with Quire
	@$(BIN)/quire generate --demo

test: $(DEV)  ## formatting, lint, types, import contract, and all tests but the slow ones
	@$(STEP) "Formatting (ruff format)" $(BIN)/ruff format --check --output-format concise .
	@$(STEP) "Lint (ruff)" $(BIN)/ruff check .
	@$(STEP) "Types (mypy)" $(BIN)/mypy
	@$(STEP) "Import contract (import-linter)" $(BIN)/lint-imports --no-cache
	@$(STEP) "Without asserts (python -O)" $(BIN)/python -O -m quire.cli.main generate demo \
	    "def add(a, b):" --max-tokens 8 --temperature 0 --quiet
ifeq ($(TESTS),)
	@$(STEP) "Tests that only compute, side by side (pytest)" $(BIN)/python -m pytest -n auto --dist loadscope $(COMPUTE)
	@$(STEP) "All other tests (pytest)" $(BIN)/python -m pytest $(addprefix --ignore=,$(COMPUTE))
else
	@$(STEP) "Tests (pytest)" $(BIN)/python -m pytest $(TESTS)
endif

test-slow: $(DEV)  ## the slow tests
	@$(STEP) "Slow tests (pytest)" $(BIN)/python -m pytest -m slow $(TESTS)

mutants: $(DEV) $(OPERATORS)/made.stamp  ## small changes of core, which its tests must notice (EVERY=1: all of them)
	@PYTHONPATH=$(OPERATORS) $(BIN)/python scripts/mutants.py --every $(or $(EVERY),8)

sanitize: $(DEV)  ## the tests of the C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer
	@rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -r src tests setup.py pyproject.toml $(SANITIZED)
	@rm -f $(SANITIZED)/$(KERNELS)/lib_*.so
	@$(STEP) "Compiling with sanitizers" $(BIN)/python scripts/compile_kernels.py $(SANITIZED)/$(KERNELS) -- \
	    -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
	@cd $(SANITIZED) && $(CURDIR)/$(STEP) "Tests of the kernels" env PYTHONPATH=src ASAN_OPTIONS=detect_leaks=0 \
	    LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	    $(CURDIR)/$(BIN)/python -m pytest $(KERNEL_TESTS)

test-arm: $(DEV)  ## the tests of the C++ kernels on an emulated ARM machine (qemu-user, g++-aarch64-linux-gnu)
	@$(STEP) "Tests of the kernels on ARM" $(BIN)/python scripts/test_on_arm.py $(TESTS)

bench: $(DEV)  ## measure all tables of benchmarks/README.md, and write them there (some 20 minutes, on a quiet machine)
	@$(BIN)/python benchmarks/run_all.py --write

bench-peers: $(DEV)  ## measure Quire beside other engines, and write the tables (half an hour, the first time an hour)
	@$(BIN)/python -m benchmarks.peers --write

gpu-check:  ## all that needs a GPU: parity, determinism, the tables of benchmarks/gpu.md (9 minutes, without .venv)
	@$(PYTHON) -m benchmarks.gpu --out $(or $(OUT),benchmarks)

gpu-bundle: $(DEV)  ## collect in build/gpu-bundle what a machine with torch and Triton alone lacks for gpu-check
	@$(STEP) "Collecting wheels" $(BIN)/python scripts/gpu_bundle.py build/gpu-bundle

format: $(DEV)  ## put the sources into the house's format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:  ## remove .venv, the compiled kernels and every cache
	rm -f $(KERNELS)/lib_*.so
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUNTIME): requirements/runtime.txt requirements/torch.txt
	@if [ -e $(BEGUN) ]; then echo "The last installation was interrupted; starting over."; rm -rf $(VENV); fi
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else \
	    "Quire needs Python 3.11 to 3.13, and $(PYTHON) is %d.%d; try: make PYTHON=python3.12" % v)'
	@mkdir -p $(VENV) && touch $(BEGUN)
	@[ -x $(BIN)/python ] || $(STEP) "Making $(VENV) with $(PYTHON)" $(PYTHON) -m venv $(VENV)
	@$(STEP) "Installing dependencies" $(PIP) --no-deps -r requirements/runtime.txt
	@$(STEP) "Installing torch (CPU)" $(PIP) --retries 1 -r requirements/torch.txt -c requirements/runtime.txt
	@rm $(BEGUN) && touch $@

$(QUIRE): $(RUNTIME) setup.py pyproject.toml $(wildcard $(KERNELS)/src/*)
	@rm -f $(KERNELS)/lib_*.so
	@$(STEP) "Installing Quire and compiling its kernels" $(PIP) --no-deps --no-build-isolation -e .
	@ls $(KERNELS)/lib_*.so >/dev/null 2>&1 || \
	    echo "    No kernels were compiled, so Quire runs on its slower torch path: 'quire doctor' tells what to do."
	@touch $@

$(DEV): $(RUNTIME) requirements/dev.txt | $(QUIRE)
	@if [ -e $(BEGUN) ]; then rm -f $(RUNTIME); $(MAKE) --no-print-directory $(QUIRE); fi
	@touch $(BEGUN)
	@$(STEP) "Installing what the tests need" $(PIP) --no-deps -r requirements/dev.txt
	@$(STEP) "Checking versions" $(BIN)/python -m pip --disable-pip-version-check check
	@rm $(BEGUN) && touch $@

$(OPERATORS)/made.stamp: requirements/mutants.txt | $(RUNTIME)
	@rm -rf $(OPERATORS)
	@$(STEP) "Installing what makes mutants" $(PIP) --no-deps --target $(OPERATORS) -r requirements/mutants.txt
	@touch $@
