# Both targets create or reuse .venv and install what is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One thread per library: two spinning pools on a shared machine are slower than one.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint docs benchmarks contract clean

$(VENV)/.installed: pyproject.toml experiments/pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "gtrace needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# torch first: asked for by another package, an installer may pick a build with gigabytes of CUDA.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[torch,dev]' --editable ./experiments
	touch $@

$(VENV)/.frameworks: $(VENV)/.installed
	# What only the tests with other frameworks need; without it they are skipped.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[frameworks]' || echo "the frameworks group could not be installed; its tests are skipped"
	touch $@

$(VENV)/.browser: $(VENV)/.installed
	# What only the tests of a report's page in a browser need, beside the system's Chromium; without it they are skipped.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[browser]' || echo "the browser group could not be installed; its tests are skipped"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/gtrace demo --force

test: $(VENV)/.frameworks $(VENV)/.browser lint
	$(BIN)/python -m pytest -q -n 2

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.installed
	$(BIN)/python -m sphinx -E -W --keep-going -q -n -b html docs docs/_build/html
	@echo docs/_build/html/index.html

benchmarks: $(VENV)/.installed
	$(BIN)/python -m pytest benchmarks --benchmark-enable --benchmark-only -q

contract: $(VENV)/.installed
	$(BIN)/python -m pytest benchmarks/bench_contract.py --benchmark-enable --benchmark-only --benchmark-quiet -q

clean:
	rm -rf $(VENV) demo docs/_build
