# `make demo` and `make test` set everything up from nothing, in .venv. `PYTHON=python3.12 make test` chooses
# the interpreter that a new .venv is made with.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c '$(NEW_ENOUGH)' >/dev/null 2>&1 && { echo "$$p"; break; }; done)

# An install is redone when what it was made from is newer than its stamp.
SOURCES := pyproject.toml constraints.txt core/miles_core/_version.py
FOR_DEMO := $(VENV)/.installed-demo
FOR_DEV := $(VENV)/.installed-dev

.PHONY: help
help:  ## list these targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

.PHONY: demo
demo: $(FOR_DEMO)  ## sample the bundled tiny model with a tool-using agent
	$(BIN)/miles-plugins rollout --prompts examples/tiny/prompts.jsonl --agent calculator \
		--tito-model qwen3 --engine local --model examples/tiny/model \
		--samples-per-prompt 4 --output demo-output --overwrite
	@echo "Look at a sample, token by token: $(BIN)/miles-plugins inspect demo-output"

.PHONY: train
train: $(FOR_DEMO)  ## improve the tiny model on its task by GRPO, on the CPU, in a few minutes
	$(BIN)/python examples/tiny/train.py --out train-output

.PHONY: test
test: $(FOR_DEV) tokenizers  ## lint, types, architecture, then every test
	@$(INSTALL_SGLANG) & installing=$$!; scripts/check; checked=$$?; wait $$installing && exit $$checked
	scripts/test

.PHONY: check
check: $(FOR_DEV)  ## lint, types, architecture
	scripts/check

INSTALL_SGLANG = PYTHONPATH=tests $(BIN)/python -m real_sglang

.PHONY: tokenizers
tokenizers: $(FOR_DEV)  ## the families' tokenizers with their real ids, for tests and the benchmark: 20 seconds, once
	@PYTHONPATH=tests $(BIN)/python -m real_tokenizers

.PHONY: sglang
sglang: $(FOR_DEV)  ## SGLang for the CPU, for tests: a minute or two, once
	@$(INSTALL_SGLANG)

.PHONY: bench
bench: $(FOR_DEV) tokenizers  ## what joins, histories and the server cost, against their bars and the run before
	$(BIN)/python benchmarks/join.py
	$(BIN)/python benchmarks/history.py
	$(BIN)/python benchmarks/server

# The site's tools announce their successors with every build.
.PHONY: docs
docs: $(FOR_DEV)  ## build the documentation site into site/
	@NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html; to look at it: $(BIN)/python -m http.server --directory site"

.PHONY: clean
clean:  ## remove .venv, caches, builds and what demo and train wrote
	rm -rf $(VENV) .cache build dist site demo-output train-output .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find core plugins tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@'$(PYTHON)' -c '$(NEW_ENOUGH)' 2>/dev/null || { \
		echo "miles-plugins needs Python 3.11 or newer, and $(if $(PYTHON),$(PYTHON) is not that,none was found): install one, or name it with PYTHON=/path/to/python3.11" >&2; exit 1; }
	@'$(PYTHON)' -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# A .venv made by other tools may lack pip. Progress is named, since the first install takes a minute or more.
INSTALL = @echo "Installing into $(VENV) ..."; \
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null; \
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable

$(FOR_DEMO): $(SOURCES) | $(BIN)/python
	$(INSTALL) '.[local,agents]'
	@touch $@

# The demo's extras are part of `dev`.
$(FOR_DEV): $(SOURCES) | $(BIN)/python
	$(INSTALL) '.[dev]'
	@touch $(FOR_DEMO) $@
