# `make rehearse` and `make test` are the two commands of README.md; each sets up all it needs in .venv.
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
SETUP  := $(VENV)/.set-up

.PHONY: setup rehearse test unit lint bench torture image-cuda clean
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

# 2.7 GB of wheels and 20 GB of disk. BASE=image:tag builds on a base of your own; without EFA where its installer is out of
# reach.
image-cuda: setup
	@url=$$($(BIN)/python -c 'from images import versions; print(versions.load().efa.url)'); \
	set -- $(if $(BASE),--base $(BASE) --tools $(BASE) --unpinned); \
	$(BIN)/python images/scripts/fetch.py --there "$$url" || set -- "$$@" --arg EFA_VERSION=; \
	$(BIN)/fab image-build --target cuda "$$@"

clean:
	rm -rf $(VENV) rehearsal/report.png rehearsal/report.md .pytest_cache .mypy_cache .ruff_cache
