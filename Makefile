# `make demo` and `make test` work on a fresh machine: both install what they need first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1
export DO_NOT_TRACK := true

.PHONY: help install tools demo demo-full test check bench test-postgres up down clean

help:
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' Makefile

install: $(STAMP) tools ## make .venv and install everything

# A local folder of wheels (PIP_FIND_LINKS) is used where there is one; on a machine without an NVIDIA
# driver uv then takes torch's CPU build.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check uv
	@bash scripts/install.sh
	@touch $@

tools:
	@bash scripts/tools.sh

demo: install ## a real campaign on CPU to a report, about ten minutes
	@$(BIN)/a3r research "Does a learning rate of 3e-4 train the small policy better at signalling than 1e-5?" --budget wall=8m --yes

demo-full: install ## rank four learning rates over three seeds, about twenty minutes
	@$(BIN)/a3r research "Which learning rate is best for signalling: 1e-5, 1e-4, 3e-4 or 1e-3?" --budget wall=24m --yes

test: install check ## static checks and the fast tests
	@$(BIN)/python -m pytest -n 2 --dist loadfile tests/unit tests/contract tests/integration
	@$(BIN)/python -m pytest tests/e2e

check: $(STAMP) ## ruff, pyright, import contracts, dead code
	@bash scripts/check.sh

bench: install ## engine ratios, turns/s over HTTP, start-up time
	@$(BIN)/python scripts/bench.py

test-postgres: install ## the store's conformance tests on a PostgreSQL server of their own
	@$(BIN)/python -m pytest -m heavy tests/contract/test_store.py

up: install ## start Prefect, MLflow and the campaign runner
	@$(BIN)/a3r up

down: ## stop them
	@$(BIN)/a3r down

clean: ## remove the environment; records in .a3r stay
	rm -rf $(VENV)
