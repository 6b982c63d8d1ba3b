# make demo: see Quire work.  make check: what takes seconds.  make test: all of it.  make help: the rest.
# A first run makes .venv; PYTHON=python3.12 picks the interpreter (3.11 to 3.14). TESTS=... narrows the tests.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# What is imported is compiled once, not by each of the hundred processes that the tests start.
unexport PYTHONDONTWRITEBYTECODE
ifndef SIDE_BY_SIDE
.NOTPARALLEL:
endif

PYTHON ?= python3
TESTS ?=
VENV := .venv
BIN := $(VENV)/bin
STEP := .ci/step
INSTALL := .ci/venv $(PYTHON) $(VENV) install
# The build of torch for CPUs, under a name that no other index has: those that pip knows are asked for it first.
TORCH := $(shell sed -n 's/^torch==.*/&+cpu/p' requirements/torch.txt)

# Stamps are written only when all of an installation has succeeded. BEGUN is there while one runs: if it is
# found at the start, the last one was interrupted, and what it left is thrown away.
RUNTIME := $(VENV)/runtime.stamp
QUIRE := $(VENV)/quire.stamp
DEV := $(VENV)/dev.stamp
BEGUN := $(VENV)/begun.stamp

KERNELS := src/quire/ops/cpu
COMPILE := $(PYTHON) scripts/compile_kernels.py $(KERNELS) --compiler $(CXX) --optional
# Where kernels are compiled to be tested in another form than the installed one.
SANITIZED := build/sanitize
# What makes mutants: not in .venv, since nothing else needs it.
OPERATORS := build/mutants
# What makes the site of the documentation.
SITE := build/docs-venv
# Tests that look at a clock, and must have the machine for themselves. All others allow for a machine that is busy, and
# share nothing but the processor: they run beside one another, those that take longest first, so that none of them is
# left for the end. One more of them runs than there are processors, since some wait for what they have started.
CLOCKED := $(patsubst %,tests/test_%.py,async_llm bench_serve bench_serve_driver cli_bench_serve cpu_library engine_health \
    frontend log patience server_admission server_fuzz server_generate_clock server_page_speed server_pulse server_stalls \
    server_streaming server_transport tokenizer_pool_deadlines)
LONGEST := $(wildcard $(patsubst %,tests/test_%.py,parallel_* cluster* speculation* server_faults server_page* server_e2e \
    determinism kv_* router* engine_* cli_serve cli_generate triton_* cpu_* structured_* server_supervisor gpu_check models_*))
CLOCKLESS = $(filter-out $(CLOCKED) $(EMULATED),$(LONGEST) tests/core $(filter-out $(LONGEST),$(wildcard tests/test_*.py)))
WORKERS = $$(($$(getconf _NPROCESSORS_ONLN) + 1))
# The instruction sets that tests need: this processor's; all where the kernels' sources are not those of the default
# branch, and in CI.
KERNELS_CHANGED = $(shell git diff --quiet origin/HEAD -- $(KERNELS) scripts/compile_kernels.py 2>/dev/null || echo yes)
SETS = $(if $(CI)$(KERNELS_CHANGED),kernels,native)
# Kernels that no processor here has are compiled where all sets are.
EMULATED = $(if $(filter native,$(SETS)),tests/test_cpu_amx.py)
# Tests that need neither torch, which they cannot import, nor kernels, but for those that take longer.
FAST := tests/core tests/test_grammar.py -m "not slow and not scale" -p tests.without_torch
KERNEL_TESTS = $(or $(TESTS),tests/test_cpu_*.py tests/test_ops*.py)

.PHONY: help demo python native kernels check check-lint check-types check-fast test test-slow test-arm mutants sanitize \
    wheel wheel-arm sdist bench bench-peers gpu-check gpu-rehearse gpu-bundle docs pictures format clean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: python  ## complete a batch of prompts with the model that ships with Quire
	@$(MAKE) --no-print-directory -j2 --output-sync=line SIDE_BY_SIDE=1 $(QUIRE) native
	@$(BIN)/quire generate --demo
	@printf '\n%s\n' "Next, try one of these (after 'source $(BIN)/activate', just 'quire ...'):"
	@printf '    %-42s %s\n' \
	    "$(BIN)/quire chat demo" "# the embedded model: completes Python, not an assistant" \
	    "$(BIN)/quire chat Qwen/Qwen3-0.6B" "# a small assistant: downloads 1.5 GB, once" \
	    "$(BIN)/quire serve demo" "# http://127.0.0.1:8000: OpenAI's API, and a web page"

python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 14) else \
	    "Quire needs Python 3.11 to 3.14, and $(PYTHON) is %d.%d; try: make PYTHON=python3.12" % v)'

# Compiling fills all cores, and what goes on beside it is one thing after the other: that must not wait.
native: python
	@$(STEP) "Compiling kernels for this processor" $(if $(SIDE_BY_SIDE),nice) $(COMPILE) --isa native

kernels: python  ## compile the kernels for all instruction sets of this kind of machine
	@$(STEP) "Compiling kernels for all instruction sets" $(if $(SIDE_BY_SIDE),nice) $(COMPILE)

check: $(DEV)  ## formatting, lint, types, import contract, and the tests of core and grammars that take no time
	@$(MAKE) --no-print-directory -j2 --output-sync=target SIDE_BY_SIDE=1 check-types check-lint check-fast

check-types:
	@$(STEP) "Types (mypy)" $(BIN)/mypy

check-lint:
	@$(STEP) "Formatting (ruff format)" $(BIN)/ruff format --check --output-format concise .
	@$(STEP) "Lint (ruff)" $(BIN)/ruff check .
	@$(STEP) "Import contract (import-linter)" $(BIN)/lint-imports --no-logo

check-fast:
	@$(STEP) "Tests of core and grammars (pytest)" $(BIN)/python -m pytest $(FAST)

ifeq ($(TESTS),)
test: $(DEV)  ## the checks, and all tests but the slow ones (TESTS=FILE: these tests alone)
	@$(MAKE) --no-print-directory -j2 --output-sync=target SIDE_BY_SIDE=1 $(SETS) check-types check-lint
	@$(STEP) "Without asserts (python -O)" $(BIN)/python -O -m quire.cli.main generate demo \
	    "def add(a, b):" --max-tokens 8 --temperature 0 --quiet
	@$(STEP) "Tests side by side (pytest)" $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope \
	    --no-loadscope-reorder --max-worker-restart 0 $(CLOCKLESS)
	@$(STEP) "Tests that look at a clock, one after the other (pytest)" $(BIN)/python -m pytest $(CLOCKED)
else
test: $(DEV) native
	@$(STEP) "Tests (pytest)" $(BIN)/python -m pytest $(TESTS)
endif

test-slow: $(DEV) kernels  ## the slow tests
	@$(STEP) "Slow tests (pytest)" $(BIN)/python -m pytest -m slow $(TESTS)

mutants: $(DEV) $(OPERATORS)/made.stamp  ## small changes of core, which its tests must notice (EVERY=1: all of them)
	@PYTHONPATH=$(OPERATORS) $(BIN)/python scripts/mutants.py --every $(or $(EVERY),8)

sanitize: $(DEV)  ## the tests of the C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer
	@rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -r src tests scripts benchmarks setup.py pyproject.toml $(SANITIZED)
	@rm -f $(SANITIZED)/$(KERNELS)/lib_*.so
	@$(STEP) "Compiling with sanitizers" $(BIN)/python scripts/compile_kernels.py $(SANITIZED)/$(KERNELS) -- \
	    -Werror -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
	@cd $(SANITIZED) && $(CURDIR)/$(STEP) "Tests of the kernels" env PYTHONPATH=src ASAN_OPTIONS=detect_leaks=0 \
	    LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	    $(CURDIR)/$(BIN)/python -m pytest -s $(KERNEL_TESTS)  # without -s, what UndefinedBehaviorSanitizer says is lost

test-arm: $(DEV)  ## the tests of the C++ kernels on an emulated ARM machine (qemu-user, g++-aarch64-linux-gnu)
	@$(STEP) "Tests of the kernels on ARM" $(BIN)/python scripts/test_on_arm.py $(TESTS)

wheel: $(DEV)  ## a wheel for any Linux of this kind of machine (manylinux_2_28) and any Python, in dist/
	@$(STEP) "Making the wheel" $(BIN)/python scripts/make_wheel.py dist

wheel-arm: $(DEV)  ## the same for aarch64, cross-compiled (g++-aarch64-linux-gnu)
	@$(STEP) "Making the wheel for aarch64" $(BIN)/python scripts/make_wheel.py dist --machine aarch64 \
	    --compiler aarch64-linux-gnu-g++

sdist: $(DEV)  ## the source distribution, with tests, in dist/
	@$(STEP) "Making the source distribution" $(BIN)/python -c \
	    "from setuptools import build_meta; build_meta.build_sdist('dist', {'--global-option': '--quiet'})"

bench: $(DEV) kernels  ## measure all tables of benchmarks/README.md, and write them there (some 20 minutes, on a quiet machine)
	@$(BIN)/python benchmarks/run_all.py --write

bench-peers: $(DEV) kernels  ## measure Quire beside other engines, and write the tables (half an hour, the first time an hour)
	@$(BIN)/python -m benchmarks.peers --write

gpu-check:  ## all that needs a GPU: parity, determinism, sweeps, the tables of benchmarks/gpu.md (40 minutes, without .venv)
	@$(PYTHON) -m benchmarks.gpu $(if $(OUT),--out $(OUT)) $(if $(LIMIT),--seconds $(LIMIT))

gpu-rehearse: $(DEV)  ## the same on a CPU, with tiny shapes and stand-ins for the device (figures mean nothing)
	@$(STEP) "Rehearsing gpu-check" nice $(BIN)/python -m benchmarks.gpu --rehearse --fresh --out build/gpu-rehearsal

gpu-bundle: $(DEV)  ## collect in build/gpu-bundle what a machine with torch and Triton alone lacks for gpu-check
	@$(STEP) "Collecting wheels" $(BIN)/python scripts/gpu_bundle.py build/gpu-bundle

docs: $(QUIRE) $(SITE)/made.stamp  ## the documentation as a site, in build/site; fails at any warning
	@$(BIN)/python scripts/options_reference.py build/docs/options.md
	@$(STEP) "Building the site (mkdocs)" env NO_MKDOCS_2_WARNING=1 $(SITE)/bin/python -m mkdocs build
	@echo "build/site/index.html"

pictures: $(DEV) native  ## draw the pictures of README.md and docs/ anew (Chromium; on a quiet machine)
	@$(BIN)/python scripts/draw_pictures.py

format: $(DEV)  ## put the sources into the house's format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:  ## remove .venv, the compiled kernels and every cache
	rm -f $(KERNELS)/lib_*.so
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUNTIME): requirements/runtime.txt requirements/torch.txt | python
	@if [ -e $(BEGUN) ]; then echo "The last installation was interrupted; starting over."; rm -rf $(VENV); fi
	@mkdir -p $(VENV) && touch $(BEGUN)
	@[ -x $(BIN)/python ] || $(STEP) "Making $(VENV) with $(PYTHON)" .ci/venv $(PYTHON) $(VENV) make
	@$(STEP) "Installing dependencies" $(INSTALL) --no-deps -r requirements/runtime.txt
	@$(STEP) "Installing torch (CPU)" .ci/either $(INSTALL) --no-deps $(TORCH) -- \
	    env PIP_RETRIES=1 $(INSTALL) -r requirements/torch.txt
	@rm $(BEGUN) && touch $@

$(QUIRE): $(RUNTIME) setup.py pyproject.toml
	@$(STEP) "Installing Quire" env QUIRE_KERNELS=none $(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

$(DEV): $(RUNTIME) requirements/dev.txt | $(QUIRE)
	@if [ -e $(BEGUN) ]; then rm -f $(RUNTIME); $(MAKE) --no-print-directory $(QUIRE); fi
	@touch $(BEGUN)
	@$(STEP) "Installing what the tests need" $(INSTALL) --no-deps -r requirements/dev.txt
	@$(STEP) "Checking versions" .ci/venv $(PYTHON) $(VENV) check
	@rm $(BEGUN) && touch $@

$(SITE)/made.stamp: requirements/docs.txt | python
	@rm -rf $(SITE)
	@$(STEP) "Making $(SITE)" .ci/venv $(PYTHON) $(SITE) make
	@$(STEP) "Installing what makes the site" .ci/venv $(PYTHON) $(SITE) install --no-deps -r requirements/docs.txt
	@touch $@

$(OPERATORS)/made.stamp: requirements/mutants.txt | $(RUNTIME)
	@rm -rf $(OPERATORS)
	@$(STEP) "Installing what makes mutants" $(INSTALL) --no-deps --target $(OPERATORS) -r requirements/mutants.txt
	@touch $@
