# `make demo` and `make test` need nothing but Python 3.11: they set up .venv first, once.
#
#   make demo          trains an unmodified Llama on 4 local processes
#   make test          the tests          (make test-slow: the slow ones)
#   make smoke         some tests on the oldest and the newest torch that is supported (see noxfile.py)
#   make check         style and types, as CI does
#   make docs          the documents, in docs/_build/html; warnings are errors   (make linkcheck: links to the web)
#   make gallery       plans of known models as pages, in docs/_build/gallery
#   make bench         the figures under benchmarks/results
#
# On a machine without a CPU wheel of torch at hand, PyPI's default build for Linux carries gigabytes of CUDA; choose with
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3.11
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
JOBS ?= 2

export OMP_NUM_THREADS ?= 1
# Tests start many processes, each of which would compile the checkout again: half a second.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow smoke check docs linkcheck gallery format bench bench-step bench-planning bench-schedules clean

help:
	@sed -n 's/^#  *make/make/p' Makefile

install: $(STAMP)

# torch goes first and pinned: resolved on its own, the build at hand wins before anything else asks for another.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools torch
	$(PIP) --no-build-isolation --editable '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/autopar calibrate --if-missing || echo 'This machine could not be measured: planning with figures of another.'
	$(BIN)/autopar run --nproc 4 examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) -m slow

smoke: $(STAMP)
	$(BIN)/python -m nox -s smoke

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Sphinx is installed when it is first needed.
DOCS := $(VENV)/.docs
SPHINX := $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet

$(DOCS): $(STAMP)
	$(BIN)/python -c 'import sphinx, furo, myst_parser, sphinx_argparse_cli' 2>/dev/null || \
	  $(PIP) --no-build-isolation --editable '.[docs]'
	touch $@

docs: $(DOCS)
	$(SPHINX) -b html docs docs/_build/html

linkcheck: $(DOCS)
	$(SPHINX) -b linkcheck docs docs/_build/linkcheck

gallery: $(STAMP)
	$(BIN)/python -m benchmarks.gallery

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: bench-planning bench-step bench-schedules

bench-planning: $(STAMP)
	$(BIN)/python -m benchmarks.planning --output benchmarks/results/planning.json

bench-step: $(STAMP)
	$(BIN)/python -m benchmarks.step_time --output benchmarks/results/step_time.json

bench-schedules: $(STAMP)
	$(BIN)/python -m benchmarks.schedules --output benchmarks/results/schedules.json

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
