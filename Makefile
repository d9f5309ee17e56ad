# `make rehearse` and `make test` are the two commands of README.md, `make prove` is the long proof; each sets up .venv first.
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
SETUP  := $(VENV)/.set-up
CORES  := $(shell getconf _NPROCESSORS_ONLN)
# One more than cores: a third of the time a test waits for another process, a disk or a socket.
JOBS   ?= $(shell expr $(CORES) + 1)
# Outside of the clone: another clone on this machine checks what has changed only.
export MYPY_CACHE_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/lustrain/mypy

# Containers like to set it, and then every process compiles all modules and tests anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup rehearse test prove unit lint bench bench-gpu torture image-cuda clean
.NOTPARALLEL:

setup: $(SETUP)

$(SETUP): pyproject.toml .ci/constraints.txt .ci/set-up
	@.ci/set-up $(VENV) $(PYTHON)
	@touch $@

rehearse: setup
	@$(BIN)/fab rehearse

# Lint runs beside the tests, and is printed after them.
test: setup
	@said=$$(mktemp); make --no-print-directory lint >"$$said" 2>&1 & lint=$$!; failed=; \
	trap 'pkill -P $$lint; kill $$lint 2>/dev/null; rm -f "$$said"; exit 130' INT TERM; \
	$(BIN)/pytest -q -m "not scene and not torture" -n $(JOBS) || failed="tests"; \
	wait $$lint || failed="$$failed lint"; cat "$$said"; rm -f "$$said"; \
	[ -z "$$failed" ] || { echo "failed: $$failed" >&2; exit 1; }

# What needs daemons, nodes or long runs, one scene after another: make prove ONLY=slurm,image; make prove LIST=1.
prove: setup
	@$(BIN)/python -m tests.prove --only '$(ONLY)' $(if $(LIST),--list)

unit: setup
	@$(BIN)/pytest -q -m "not slow and not scene and not torture" -n $(CORES) --hypothesis-profile=quick

lint: setup
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

bench: setup
	@$(BIN)/pip install --quiet --constraint .ci/constraints.txt --editable '.[bench]'
	@$(BIN)/python -m tests.bench

# Where torch sees a GPU: make bench-gpu ONLY=plans; DRY=1 prints the plan and its memory on any machine.
bench-gpu: setup
	@$(BIN)/python -m tests.bench.gpu --only '$(ONLY)' $(if $(DRY),--dry-run)

torture: setup
	@$(BIN)/pytest -q -m torture tests/torture tests/node_setup tests/lab

# 2.7 GB of wheels and 20 GB of disk. BASE=image:tag builds on a base of your own; without EFA where its installer is out of
# reach.
image-cuda: setup
	@url=$$($(BIN)/python -c 'from images.plan import versions; print(versions.load().efa.url)'); \
	set -- $(if $(BASE),--base $(BASE) --tools $(BASE) --unpinned); \
	$(BIN)/python images/scripts/fetch.py --there "$$url" || set -- "$$@" --arg EFA_VERSION=; \
	$(BIN)/fab image-build --target cuda "$$@"

clean:
	rm -rf $(VENV) rehearsal/report*.png rehearsal/report*.md .pytest_cache .ruff_cache
