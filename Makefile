# Everything is made in .venv; PYTHON names the interpreter to make it with.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
EXTRAS ?= dev
# All but what takes long, which CI runs too: make test PYTEST_ARGS= runs everything.
PYTEST_ARGS ?= -m "not slow"

.PHONY: demo test check docs package results accelerator clean

# The plugins that `aot` compiles with are for Linux on x86-64 only, and take no part in
# a run on the CPU: JAX need not look for them.
export JAX_PLATFORMS ?= cpu
# Where modules are compiled anew by each process, importing JAX takes three times as long.
unexport PYTHONDONTWRITEBYTECODE

demo: $(VENV)/installed
	$(BIN)/python examples/train_lm.py

test: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 --dist=loadgroup $(PYTEST_ARGS)

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

# The pages with all that they refer to, and the notebook run: warnings are errors.
docs: $(VENV)/docs-installed
	$(BIN)/sphinx-build -q -W --keep-going --fresh-env -b html docs out/docs

$(VENV)/docs-installed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	touch $@

# Needs no environment but those that it makes: what a user has who installs the wheel.
package:
	$(PYTHON) tests/lib/package.py

results: $(VENV)/installed
	$(BIN)/python -m benchmarks.results

# On a machine with a GPU or a TPU: needs JAX, optax and Flax in the environment that is
# there, or in the interpreter; with pytest, the tests marked accelerator are a part of it.
# make accelerator ARGS=--dry tries it at toy size.
accelerator:
	env -u JAX_PLATFORMS $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m benchmarks.chip $(ARGS)

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	touch $@

clean:
	rm -rf $(VENV) out dist
