# Everything sets itself up: `make demo` and `make test` work in an empty clone with Python 3.11+.
PYTHON ?= python3
BIN := .venv/bin
SOAK_MINUTES ?= 60
# Rooms of daemons are one worker's, one after another, and all else is for the others (tests/conftest.py).
JOBS ?= 2
# Hundreds of processes are started; each would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test lint bench soak clean
.DEFAULT_GOAL := help

help: ## what can be made
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 10

.venv/ready: pyproject.toml constraints.txt
	@echo "== setting up .venv (a few minutes the first time: torch is large)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "meshd needs Python 3.11 or newer; say make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on --no-compile -c constraints.txt -e '.[engine,dev]' | grep -E --line-buffered '^(Collecting|Installing|Successfully|ERROR)' || true
	@# The pipe above hides pip's exit status; and what is used of ten thousand modules is compiled here, once, not all of them.
	@$(BIN)/python -c 'import meshd.daemon, meshd.cli.app, meshd.inference.worker.stage, meshd.inference.text_worker.__main__, openai, pytest'
	@touch $@

demo: .venv/ready ## four daemons on loopback answer a question while one is killed
	@$(BIN)/meshd demo

test: .venv/ready ## all tests but the long ones
	@$(BIN)/meshd pull smollm2-135m
	$(BIN)/python -m pytest -q -n $(JOBS) -m "not soak" $(TESTS)

lint: .venv/ready ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/ready ## every benchmark, JSON lines under benchmarks/results
	@$(BIN)/meshd pull smollm2-135m
	$(BIN)/python -m benchmarks $(BENCH)

soak: .venv/ready ## the long tests (SOAK_MINUTES)
	@$(BIN)/meshd pull smollm2-135m
	SOAK_MINUTES=$(SOAK_MINUTES) $(BIN)/python -m pytest -q -m soak $(TESTS)

clean: ## forget .venv, caches and results (models stay in the store)
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis benchmarks/results/*.jsonl
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
