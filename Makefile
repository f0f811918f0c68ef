# Both targets create or reuse .venv and install what is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One thread per library: two spinning pools on a shared machine are slower than one.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test tests lint docs wheel release-check reproduction benchmarks contract clean

# pip installs torch, first: asked for by another package, an installer may pick a build with gigabytes of CUDA. uv installs the rest
# in a fifth of pip's time; it does not read pip's settings, so pip takes over if it finds no index.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
UV := $(BIN)/uv pip install --python $(BIN)/python --quiet --constraint constraints.txt
comma := ,
install = $(UV) $(1) || $(PIP) $(1)

$(VENV)/.installed: pyproject.toml experiments/pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "gtrace needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --no-compile torch uv
	$(call install,--editable '.[torch$(comma)dev]' --editable ./experiments)
	touch $@

$(VENV)/.tested: $(VENV)/.installed
	# What only the tests with other frameworks and those of a page in the system's Chromium need; without it they are skipped.
	$(call install,--editable '.[frameworks$(comma)browser]') || echo "other frameworks and playwright could not be installed; their tests are skipped"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/gtrace demo --force

# mypy beside the rest of the installation and the tests: together they keep two cores busy to the end.
test: $(VENV)/.installed
	$(MAKE) --jobs 2 lint tests

# Hundreds of processes import the same modules: bytecode is written once, and not beside a test's scripts.
pytest = env -u PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX=$(abspath $(VENV))/pycache $(BIN)/python -m pytest -q

# One process imports all that the tests import before two of them do: each would compile the same files to bytecode.
$(VENV)/.collected: $(VENV)/.tested
	$(pytest) --collect-only >/dev/null || true  # what is wrong, the tests say
	touch $@

tests: $(VENV)/.collected
	$(pytest) -n 2 --max-worker-restart 0

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.installed
	$(BIN)/python -m sphinx -E -W --keep-going -q -n -b html docs docs/_build/html
	@echo docs/_build/html/index.html

# dist/gradtrace-VERSION-py3-none-any.whl: the command and the package gtrace, without the experiments.
wheel: $(VENV)/.installed
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

# sdist and wheel, and the wheel in fresh environments of Python 3.11 to 3.13, those that are installed: some minutes each.
release-check: $(VENV)/.installed
	$(BIN)/python benchmarks/release_check.py

# docs/reproduction.md and the pages beside it, from the results in docs/reproduction.
reproduction: $(VENV)/.installed
	$(BIN)/python experiments/pages.py

benchmarks: $(VENV)/.installed
	$(BIN)/python -m pytest benchmarks --benchmark-enable --benchmark-only -q

contract: $(VENV)/.installed
	$(BIN)/python -m pytest benchmarks/bench_contract.py --benchmark-enable --benchmark-only --benchmark-quiet -q

clean:
	rm -rf $(VENV) demo dist docs/_build
