# The commands of CONTRIBUTING.md. BIN is where python, ruff, mypy and pytest are: `make check BIN=` takes them from PATH.
VENV ?= .venv
BIN ?= $(VENV)/bin/

.PHONY: setup check test bench build figures

setup:
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev]'

check:
	$(BIN)ruff check .
	$(BIN)ruff format --check .
	$(BIN)mypy

# First what can run side by side, then what can't: `pytest` alone runs all of it, one after another.
test:
	$(BIN)pytest --numprocesses 2 --no-loadscope-reorder -m 'not alone'
	$(BIN)pytest -m alone

bench:
	$(BIN)python benchmarks/tools.py --quick --json
	$(BIN)python benchmarks/limiter.py --quick --json
	$(BIN)python benchmarks/sandbox.py --quick --json
	$(BIN)python benchmarks/rewards.py --quick --json
	$(BIN)python benchmarks/rollout.py --quick --json
	$(BIN)python benchmarks/records.py --quick --json
	$(BIN)python benchmarks/cluster.py --quick --json
	$(BIN)python benchmarks/trl.py --quick --json

build:
	$(BIN)python -m build

figures:
	$(BIN)python docs/make_figures.py
	$(BIN)python docs/make_scale.py
	$(BIN)python docs/make_viewer_pictures.py
	$(BIN)python docs/make_run_picture.py
