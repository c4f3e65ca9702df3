# Every command of the project. `make help` explains them.
#
# .venv is made once, and brought up to date when pyproject.toml or constraints.txt changes.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
BUILD := build
RUNTIME_READY := $(VENV)/runtime.stamp
DEV_READY := $(VENV)/dev.stamp
REQUIREMENTS := pyproject.toml constraints.txt scripts/environment.py

.PHONY: help demo test lint pytest package soak clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo '  PYTHON=python3   interpreter to build on, 3.11 or 3.12; if it has a CUDA build of torch, that one is used'
	@echo '  WORKERS=2        processes that run the tests'

demo: $(RUNTIME_READY) ## Ask octavo-nano, the small model that comes with Octavo (installs what it needs)
	@$(BIN)/octavo generate --no-thinking "Explain what an octavo is." "What can you do?" \
		"Rosa has 14 pears. She buys 23 more. Then she gives away 9. How many pears does Rosa have now?"

test: $(DEV_READY) ## Lint, run the tests, build the package and use it elsewhere
	@for stage in lint pytest package; do \
		printf '\n== make test: %s\n' $$stage; \
		$(MAKE) --no-print-directory $$stage || { printf '\nmake test: FAILED in %s\n' $$stage; exit 1; }; \
	done; \
	tests=$$(tail -n 1 $(BUILD)/pytest.log | tr -d =); \
	printf '\nmake test: PASSED in %d s (lint clean;%stests; package works)\n' $$SECONDS "$$tests"

lint: $(DEV_READY) ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

pytest: $(DEV_READY) ## Run the tests alone
	@mkdir -p $(BUILD)
	$(BIN)/python -m pytest -n $(WORKERS) 2>&1 | tee $(BUILD)/pytest.log

package: $(DEV_READY) ## Build the package and use it outside the tree
	@scripts/package.sh $(PYTHON) $(BIN)/python

soak: $(DEV_READY) ## Run the tests with the long form of every proof
	@$(BIN)/python -m pytest -n $(WORKERS) --soak --timeout 7200
	@printf '\nmake soak: PASSED\n'

clean: ## Remove everything that make made, .venv included
	rm -rf $(VENV) $(BUILD) dist octavo.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find octavo tests scripts tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUNTIME_READY): $(REQUIREMENTS)
	@$(PYTHON) scripts/environment.py $(VENV) --editable .
	@touch $@

$(DEV_READY): $(REQUIREMENTS)
	@$(PYTHON) scripts/environment.py $(VENV) --editable '.[dev]'
	@touch $(RUNTIME_READY) $@
