# Each target does all of its own set-up, from a fresh clone, with Python 3.11 or newer and make alone.
#
#   make demo    four hospitals train one model on this machine   [DATA=DIR] [ALGORITHM=fedavg|fedsoup|fenda] [SECURE=1] [STATE=DIR]
#   make test    every test but the few long ones   [WITHOUT=MARKER]
#   make chaos   these: processes that are killed, federations on real data, notebooks, Ray   [WITHOUT=MARKER]
#   make attacks the attacks that were thought of, and what refuses each, as a table
#   make fuzz    changed examples at every door, for 10 minutes   [MINUTES=N | CASES=N] [SEED=N] [TARGET=NAME] [ATHERIS=1]
#   make check   lint, types and the tests of what you changed   [FILES='a b']
#   make lint    ruff, mypy, import contracts, generated stubs
#   make lock    the packages of a deployment with their hashes, in deploy/lock
#   make docs    the documentation as a site, in site/
#   make bench   what a round costs, beside the floor of the same bytes   [ARGS='--full --out DIR']
#   make bench-counts   what no machine's speed changes: passes over the bytes, fsyncs, calls, threads; none may grow
#   make bench-peers   the same with Flower beside it, in the same run   [FLOWER_VENV=DIR]
#   make evidence   the figures of docs/evidence.md (about half an hour)
#   make evidence-faults   those of programs killed, disks filled and lines cut (hours)
#   make evidence-year   a year of certificates, restarts and upgrades on a clock that is moved (an hour; needs libfaketime)

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ALGORITHM ?= fenda
DATA ?=
STATE ?=
CASES ?=
MINUTES ?= 10
SEED ?= 1
TARGET ?=
FILES ?=
ATHERIS ?=
WITHOUT ?=
ARGS ?=

.PHONY: demo evidence evidence-faults evidence-year check test attacks fuzz chaos lint lint-deploy lock docs format proto bench bench-counts bench-peers install dev clean

demo: install
	@$(BIN)/python -m tools.demo --algorithm $(ALGORITHM) $(if $(DATA),--data $(DATA)) $(if $(SECURE),--secure) $(if $(STATE),--state $(STATE))

# Hundreds of processes start: where the environment forbids it, each would compile our modules again.
test chaos attacks bench bench-counts bench-peers: export PYTHONDONTWRITEBYTECODE :=

test: dev
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not chaos$(if $(WITHOUT), and not $(WITHOUT))"

check: dev
	@$(BIN)/python -m tools.check $(FILES)

chaos: dev
	@$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "chaos$(if $(WITHOUT), and not $(WITHOUT))"

attacks: dev
	@$(BIN)/python -m pytest -n 2 --attack-table tests/attacks

fuzz: dev
	@$(BIN)/python -W ignore -m tools.fuzz $(if $(CASES),--cases $(CASES),--minutes $(MINUTES)) --seed $(SEED) $(if $(TARGET),--target $(TARGET)) $(if $(ATHERIS),--atheris)

bench: install
	@$(BIN)/python -m bench $(ARGS)

bench-counts: install
	@$(BIN)/python -m bench.counts

bench-peers: install
	@$(BIN)/python -m bench --peers $(ARGS)

evidence: dev
	$(BIN)/python -m tools.evidence_egress
	$(BIN)/python -m tools.evidence_egress --payload "8 MB"
	$(BIN)/python -m tools.evidence_egress --payload "45 MB" --rounds 5
	$(BIN)/python -m tools.evidence_egress --rounds 1 --leak 65536
	$(BIN)/python -m tools.evidence_egress --payload "8 MB" --rounds 1 --leak 65536
	$(BIN)/python -m tools.evidence_egress --payload "45 MB" --rounds 1 --leak 450000
	$(BIN)/python -m tools.evidence_isolation
	$(BIN)/python -m tools.evidence_cost
	$(BIN)/python -m tools.evidence_tamper
	$(BIN)/python -m tools.evidence_verify_speed
	$(BIN)/python -m tools.evidence_identity renewals
	$(BIN)/python -m tools.evidence_identity redemptions

# Hours on a quiet machine: programs killed, disks filled, lines cut. A short version of each is under `make chaos`.
evidence-faults: dev
	$(BIN)/python -m tools.evidence_kills
	$(BIN)/python -m tools.evidence_kills --model "8 MB"
	$(BIN)/python -m tools.evidence_kills --secure --kills 200
	$(BIN)/python -m tools.evidence_stops
	$(BIN)/python -m tools.evidence_syscalls
	$(BIN)/python -m tools.evidence_disk --side coordinator
	$(BIN)/python -m tools.evidence_disk --side site
	$(BIN)/python -m tools.evidence_line
	$(BIN)/python -m tools.evidence_crowd
	$(BIN)/python -m tools.evidence_soak

evidence-year: dev
	$(BIN)/python -m tools.evidence_year

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tools.proto --check

lint-deploy: $(VENV)/.deploy
	$(BIN)/python -m tools.check_deploy

lock: $(VENV)/.lock
	@$(BIN)/python -m tools.lock

docs: $(VENV)/.docs
	@$(BIN)/python -m tools.site

format: dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: dev
	$(BIN)/python -m tools.proto

install: $(VENV)/.site
dev: $(VENV)/.dev

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed; name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.site: pyproject.toml | $(BIN)/python
	@echo "Installing wardround with torch into $(VENV) (the first time about 90 s; most of it is torch)" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[site,lab]'
	@touch $@

# --group needs pip 25.1, newer than the one that Python 3.11 brings.
$(VENV)/.dev: pyproject.toml $(VENV)/.site
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group dev
	@touch $@

$(VENV)/.docs: pyproject.toml $(VENV)/.dev
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group docs
	@touch $@

$(VENV)/.lock: pyproject.toml $(VENV)/.dev
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group lock
	@touch $@

$(VENV)/.deploy: pyproject.toml $(VENV)/.dev
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group deploy
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
