# Everything a fresh machine needs: `make demo`, `make test`. Both make their own environment in .venv first.
# They need Python >= 3.11, a C++ compiler and make, and say what to do when one of them is missing.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# Whatever the environment says: tests start many processes, each of which would compile all modules of ours again.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt

# Settings: make test PYTHON=python3.12 WORKERS=4 ARGS='-k topk'
PYTHON  ?=
WORKERS ?= auto
ARGS    ?=

.PHONY: help demo test lint format docs check setup setup-demo clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: setup-demo ## compile a layer, show its CUDA and run it here; needs no GPU
	@$(BIN)/moesaic demo

test: setup ## lint, then run every test that this machine can run
	@lint=passed; $(MAKE) lint || lint=failed; \
	tests=passed; $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS) || tests=failed; \
	[ $$lint$$tests = passedpassed ] || { echo "make test: lint $$lint, tests $$tests" >&2; exit 1; }

lint: setup ## ruff (rules and format), and mypy over the package, benchmarks and examples
	@failed=0; \
	$(BIN)/ruff check --quiet --output-format concise . || failed=1; \
	$(BIN)/ruff format --check --quiet --output-format concise . || failed=1; \
	$(BIN)/mypy || failed=1; \
	[ $$failed = 0 ] || { echo "lint failed; 'make format' repairs what ruff can repair" >&2; exit 1; }

format: setup ## let ruff rewrite the files
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

docs: setup ## write again what comes from the code and from tables
	@$(BIN)/python docs/generate.py
	@$(BIN)/python benchmarks/plots.py

setup-demo: $(VENV)/.demo-stamp ## make the environment for the demo only
setup: $(VENV)/.test-stamp ## make the environment for tests and development

$(VENV)/.demo-stamp: pyproject.toml constraints.txt
	@python=$$($(MAKE) -s check); \
	if ! $(BIN)/python -c 'import pip' 2>/dev/null; then \
	  echo "setup: making $(VENV) with $$python" >&2; "$$python" -m venv --clear $(VENV); \
	fi
	@echo "setup: installing PyTorch (a few minutes where it has to be downloaded)" >&2
	@$(PIP) torch
	@echo "setup: installing moesaic and what it needs" >&2
	@$(PIP) --editable '.[torch,cli,emulate,models]'
	@touch $@

$(VENV)/.test-stamp: $(VENV)/.demo-stamp
	@echo "setup: installing the test and development tools" >&2
	@$(PIP) --editable '.[torch,cli,emulate,sass,test,dev]'
	@touch $@

# Prints the Python to use, or says what is missing and how to get it.
check: ## look for Python and a C++ compiler
	@found=; seen=; \
	for p in $(if $(PYTHON),'$(PYTHON)',python3 python3.13 python3.12 python3.11 python3.14 python); do \
	  command -v "$$p" >/dev/null 2>&1 || continue; \
	  version=$$("$$p" -c 'import sys; print("%d.%d" % sys.version_info[:2]); sys.exit(sys.version_info < (3, 11))' 2>/dev/null) \
	    && { found=$$p; break; } \
	    || seen="$$seen $$p is $${version:-not usable};"; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "error: moesaic needs Python >= 3.11 (found:$${seen:- none})" >&2; \
	  echo "  install one, e.g. 'apt-get install python3.11 python3.11-venv', or name one with PYTHON=/path/to/python3.11" >&2; \
	  exit 1; \
	fi; \
	if ! "$$found" -c 'import venv, ensurepip' >/dev/null 2>&1; then \
	  echo "error: $$found has no venv module" >&2; \
	  echo "  install it, e.g. 'apt-get install python$$version-venv'" >&2; \
	  exit 1; \
	fi; \
	cxx=; for c in "$${CXX:-}" c++ g++ clang++; do \
	  [ -n "$$c" ] && command -v $${c%% *} >/dev/null 2>&1 && { cxx=$$c; break; }; \
	done; \
	if [ -z "$$cxx" ]; then \
	  echo "error: no C++ compiler (looked for CXX, c++, g++, clang++); the generated CUDA runs on the CPU through one" >&2; \
	  echo "  install one, e.g. 'apt-get install g++'" >&2; \
	  exit 1; \
	fi; \
	echo "$$found"

clean: ## remove the environment, build output and caches of this folder
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
