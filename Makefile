# `make rehearse` and `make test` are the two commands of README.md; each sets up all it needs in .venv.
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
SETUP  := $(VENV)/.set-up

.PHONY: setup rehearse test unit lint bench torture clean
.NOTPARALLEL:

setup: $(SETUP)

$(SETUP): pyproject.toml .ci/constraints.txt .ci/set-up
	@.ci/set-up $(VENV) $(PYTHON)
	@touch $@

rehearse: setup
	@$(BIN)/python -m rehearsal

test: lint
	@$(BIN)/pytest -q -m "not torture"

unit: setup
	@$(BIN)/pytest -q -m "not slow and not torture"

lint: setup
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

bench: setup
	@$(BIN)/pip install --quiet --constraint .ci/constraints.txt --editable '.[bench]'
	@$(BIN)/python -m tests.bench

torture: setup
	@$(BIN)/pytest -q -m torture tests/torture

clean:
	rm -rf $(VENV) rehearsal/report.png rehearsal/report.md .pytest_cache .mypy_cache .ruff_cache
