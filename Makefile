# What CI runs, by name. PYTHON is the interpreter of an environment with `pip install -e ".[dev]"`.
PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)

.PHONY: contract check docs format lint types test test-fast test-nightly wheel bench gauges

check: lint types test contract

format:
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

lint:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .

types:
	$(PYTHON) -m mypy

test:
	$(PYTHON) -m pytest -n 3 $(ARGS)

contract:
	$(PYTHON) -m tests.contract compare

test-fast:
	$(PYTHON) -m pytest -n 3 --lane fast

test-nightly:
	$(PYTHON) -m pytest -n 3 --lane nightly

wheel:
	$(PYTHON) tests/packaging/wheel.py

# Needs `pip install -e ".[dev,docs]"`; nothing is fetched. Pages are in site/.
docs:
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet -f tests/docs/mkdocs.yml

bench:
	for bench in tests/benchmarks/bench_*.py; do $(PYTHON) $$bench || exit 1; done

# GAUGES="--tests FILE", "--reach DIR", "--static" or "--growth TEXT": python -m tests.gauges --help
gauges:
	$(PYTHON) -m tests.gauges $(GAUGES)
