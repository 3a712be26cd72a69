# Every target does its own set-up: `make run` on a fresh clone is enough. `make -C DIR TARGET` works from anywhere.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules --no-print-directory
# Tests start hundreds of processes, and each would compile all our code and rewrite all asserts anew.
unexport PYTHONDONTWRITEBYTECODE

ROOT := $(dir $(abspath $(lastword $(MAKEFILE_LIST))))
VENV ?= $(ROOT).venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# Whole test files go to one of three workers, so that fixtures that start processes are shared within a file; the
# longest begin first (tests/plugins/long_first.py). Half of the time of most tests is waiting: three keep two
# processors busy.
PYTEST_WORKERS ?= -n 3 --dist loadfile --no-loadscope-reorder
ARGS ?=
SKIP ?=
CACHE ?=
RECORD ?=
STRICT ?=
SEEDS ?= 10000
ADMIN_SEEDS ?= 1000
SEED ?=
EXAMPLES ?= 200
FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?= frames packets edge node
SIM := $(PYTEST) -p no:randomly -p no:cacheprovider --timeout 3600
# Blocks of seeds go to two workers; one seed alone needs none.
SIM_WORKERS ?= $(if $(SEED),,-n 2 --dist worksteal)

RUNTIME := $(VENV)/.iop-runtime
DEV := $(VENV)/.iop-dev

.PHONY: help setup run test test-slow engines-test api-fuzz lint types fmt clauses conformance check bench scale admin-load crash proto proto-check docs sim sim-admin sim-planted fuzz lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(lastword $(MAKEFILE_LIST)) | sort | sed -E 's/:.*## /\t/' | expand -t 14

# The stamps are remade when a lock file or the package's metadata changes.
$(RUNTIME): requirements/runtime.txt pyproject.toml tools/bootstrap.sh
	@bash tools/bootstrap.sh "$(VENV)" requirements/runtime.txt
	@touch $@

$(DEV): requirements/dev.txt pyproject.toml tools/bootstrap.sh
	@bash tools/bootstrap.sh "$(VENV)" requirements/dev.txt
	@touch $@ $(RUNTIME)

setup: $(DEV)  ## make .venv with everything that development needs, hash-pinned

run: $(RUNTIME)  ## start Edge, Node and reference engine, and say what to try (ARGS="--http 127.0.0.1:8081")
	@exec $(BIN)/iop up $(ARGS)

test: $(DEV)  ## all tests but the long ones (ARGS="-k name")
	$(PYTEST) $(PYTEST_WORKERS) -m "not soak" $(ARGS)

test-slow: $(DEV)  ## the tests that take minutes
	$(PYTEST) -m soak --timeout 900 $(ARGS)

engines-test: $(DEV)  ## real engines, installed beside the tree (SKIP="vllm llamacpp llama-server gemma", CACHE=DIR, RECORD=1, ARGS="-k name")
	$(BIN)/python tools/engines_test.py $(addprefix --skip ,$(SKIP)) $(if $(CACHE),--cache $(CACHE)) $(if $(RECORD),--record) -- $(ARGS)

lint: $(DEV)  ## style, banned calls, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: $(DEV)  ## mypy, strict, on src
	$(BIN)/mypy

fmt: $(DEV)  ## format the code and fix what can be fixed safely
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clauses: $(DEV)  ## a line per clause of the contract: tested (in the last run) or missing (STRICT=EN fails on a gap)
	@$(BIN)/python tools/clauses.py $(if $(STRICT),--strict $(STRICT))

check:  ## what CI runs
	@bash .ci/run

api-fuzz: $(DEV)  ## schemathesis against the OpenAPI description, on each kind of provider (EXAMPLES=200 for each operation)
	IOP_API_EXAMPLES=$(EXAMPLES) $(PYTEST) tests/integration/api_http/test_http_description.py $(ARGS)

conformance: $(DEV)  ## our servers, with every hook, and the wrong servers under the conformance suite (minutes)
	$(PYTEST) tests/unit/conformance tests/integration/conformance tests/e2e/test_e2e_conformance.py --timeout 1200 $(ARGS)

bench: $(DEV)  ## direct call against through-the-fleet, one table (ARGS="--json")
	@$(BIN)/python bench/run.py $(ARGS)

scale: $(DEV)  ## 1,000 Nodes, stopped readers and large uploads on one Edge: figures (ARGS="nodes --nodes 200")
	@$(BIN)/python bench/fleet_scale.py $(ARGS)

admin-load: $(DEV)  ## 200 weight updates under load, every answer judged (ARGS="--updates 20 --keep-every 5")
	@$(BIN)/python bench/admin_load.py $(ARGS)

crash: $(DEV)  ## kill -9 of Edge and engine at every journal write of every operation (minutes)
	$(PYTEST) -m soak --timeout 3600 tests/soak/admin $(ARGS)

proto: $(DEV)  ## regenerate the protobuf bindings
	$(BIN)/python tools/gen_proto.py

proto-check: $(DEV)  ## fail if the checked-in bindings are not what the protos generate
	$(BIN)/python tools/gen_proto.py --check

docs: $(DEV)  ## build the documentation site into site/
	$(BIN)/python tools/gen_settings.py
	$(BIN)/python tools/gen_cli.py
	$(BIN)/python tools/gen_adapters.py
	$(BIN)/python tools/gen_openapi.py
	$(BIN)/python tools/gen_errors.py
	@$(BIN)/python -c 'import mkdocs' 2>/dev/null || $(BIN)/python -m pip install --quiet --require-hashes -r requirements/docs.txt
	$(BIN)/python -m mkdocs build --strict

sim: $(DEV)  ## the simulations on virtual time (SEEDS=10000 of the Edge, SEED=n replays one)
	IOP_SIM_SEEDS=$(SEEDS) IOP_SIM_SEED=$(SEED) $(SIM) $(SIM_WORKERS) tests/sim/edge --deselect tests/sim/edge/test_edge_planted.py $(ARGS)
	IOP_SIM_SEEDS=$(if $(SEED),$(SEED):1,0:$(ADMIN_SEEDS)) $(SIM) $(SIM_WORKERS) tests/sim/admin $(ARGS)

sim-planted: $(DEV)  ## prove that the simulation's checks bite: every planted bug is caught
	IOP_SIM_PLANTED=1 $(SIM) $(SIM_WORKERS) tests/sim/*/test_*planted*.py $(ARGS)

sim-admin: $(DEV)  ## 10,000 seeds of each simulation of the operation core (SEEDS=n of them, SEED=n replays one)
	IOP_SIM_PROGRESS=500 IOP_SIM_SEEDS=$(if $(SEED),$(SEED):1,0:$(SEEDS)) $(SIM) --timeout 0 -s tests/sim/admin/test_sim_admin_random.py tests/sim/admin/test_sim_admin_selectors.py $(ARGS)

fuzz: $(DEV)  ## fuzz what reads a peer's bytes, guided by coverage (FUZZ_SECONDS=60 for each target)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/python -m pip install --quiet --require-hashes -r requirements/fuzz.txt
	@for target in $(FUZZ_TARGETS); do echo "fuzzing: $$target"; \
		$(BIN)/python tests/fuzz/fuzz_wire.py $$target -max_total_time=$(FUZZ_SECONDS) $(ARGS) || exit 1; done

lock: $(DEV)  ## resolve the locks anew: versions and hashes, no index address
	@bash tools/lock.sh "$(BIN)"

clean:  ## remove what the targets made, the virtual environment too
	rm -rf "$(VENV)" .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .clauses.json site
	find src tests tools bench -name __pycache__ -prune -exec rm -rf {} +
