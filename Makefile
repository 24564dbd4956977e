# Every target sets up what it needs in .venv, once; the second time nothing is installed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup quickstart test lint types check docs bench-trl clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

setup: $(READY) ## make .venv with the locked packages and tailrace in it

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11; call make PYTHON=python3.11 (or newer)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-deps --requirement requirements.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

quickstart: $(READY) ## train SmolLM2-135M on two-number sums, about six minutes on 2 cores
	$(BIN)/tailrace train recipes/quickstart.yaml output_dir=runs/quickstart-$$(date +%Y%m%d-%H%M%S)

test: $(READY) ## the tests; any warning is an error
	$(BIN)/pytest

lint: $(READY) ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## mypy --strict
	$(BIN)/mypy

check: lint types test ## lint, types and tests: what CI runs

docs: $(READY) ## write docs/recipes.md from the schemas
	$(BIN)/python -m tailrace.config.reference > docs/recipes.md

bench-trl: $(READY) ## samples/s beside TRL's GRPOTrainer, in an environment of its own
	$(BIN)/python benchmarks/bench_trl.py

clean: ## remove what was built and installed, but no run
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
