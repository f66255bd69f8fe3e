# The commands of CONTRIBUTING.md. BIN is the directory of python, ruff, mypy and pytest; `make check BIN=` uses PATH.
VENV ?= .venv
BIN ?= $(VENV)/bin/

.PHONY: setup check test test-all nightly bench build docs figures

setup:
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet uv
	UV_PROJECT_ENVIRONMENT=$(VENV) $(VENV)/bin/uv sync --quiet --locked --inexact --extra dev

check:
	$(BIN)ruff check .
	$(BIN)ruff format --check .
	$(BIN)mypy
	$(BIN)lint-imports

# The lane that needs neither Ray nor an engine nor a sandbox: seconds, on any machine.
test:
	$(BIN)python scripts/run_lanes.py unit

# All lanes and benchmarks, then a table of their durations. LANES="sandbox ray" runs these only.
test-all:
	$(BIN)python scripts/run_lanes.py $(LANES)

# Property tests with 30 times as many examples, simulations with 100 times as many seeds, ten minutes of load and
# attacks, a storm of stopped workers, the tests of each defence, and 24,000 random trajectories of all model families.
nightly:
	$(BIN)python scripts/run_lanes.py unit -- --hypothesis-profile=nightly --simulation-seeds=200000
	$(BIN)pytest tests/sandbox/test_soak.py tests/run/test_run.py -k "soak or suspended_ray_workers" --soak-seconds=600
	$(BIN)python scripts/check_defences.py
	$(BIN)python benchmarks/formats.py

bench:
	$(BIN)python scripts/run_lanes.py bench

build:
	$(BIN)python -m build

# The documentation site, in site/. Fails for a broken link or anchor.
docs:
	NO_MKDOCS_2_WARNING=1 $(BIN)mkdocs build --strict --quiet

figures:
	$(BIN)python scripts/make_figures.py
	$(BIN)python scripts/make_scale.py
	$(BIN)python scripts/make_viewer_pictures.py
	$(BIN)python scripts/make_run_picture.py
	$(BIN)python scripts/make_demo_picture.py
