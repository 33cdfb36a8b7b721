# `make demo` and `make test` need nothing but Python 3.11+ and make: they set up .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# The libraries that benchmarks/others.py compares with ask for other versions than ours.
BENCH := .venv-bench

.PHONY: demo test bench check lint types format clean

demo: $(VENV)/.demo
	$(BIN)/abnn demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

# One after the other: two at once would time each other. auto_sampling.py, the last, reads ../shared.
bench: $(VENV)/.dev $(BENCH)/.bench
	$(BIN)/python benchmarks/sampling.py
	$(BIN)/python benchmarks/fit_step.py
	$(BENCH)/bin/python benchmarks/others.py
	$(BENCH)/bin/python benchmarks/oracles.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/pixels.py
	$(BIN)/python benchmarks/data_parallel.py
	$(BIN)/python benchmarks/auto_sampling.py

check: lint types test

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(BENCH)/bin/python:
	$(PYTHON) -m venv $(BENCH)

# The stamps keep set-up from running again until what it installs from has changed.
$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[demo]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.demo

$(BENCH)/.bench: pyproject.toml benchmarks/requirements.txt | $(BENCH)/bin/python
	$(BENCH)/bin/python -m pip --disable-pip-version-check --quiet install \
		-r benchmarks/requirements.txt -e .
	touch $@

clean:
	rm -rf $(VENV) $(BENCH) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
