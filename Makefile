# make setup   .venv with torch, everything else gsync needs, and gsync itself, built for this machine (editable)
# make bench   setup, then the main job on two local processes
# make test    setup, then the tests, but for the slow ones
# make test-all  setup, then all tests
# make soak    setup, then 20,000 steps of training with faults, through each door
# make lint    setup, then ruff, clang-format, mypy
# make gpu     on a machine with an NVIDIA GPU: builds for it, runs the tests that need it, measures; with PYTHON's torch, no .venv
# make coverage  setup, then which lines of csrc the tests run (docs/testing.md)
# make clean   removes what was built (.venv stays; make distclean removes it too)
#
# TORCH="torch==2.13.0"  another torch than the newest that gsync supports. The environment remembers it.
# VENV=.venv-cpu         another environment; PYTHON=python3.12 another interpreter
# BENCH_ARGS, PYTEST_ARGS, SOAK_ARGS  go to `gsync bench`, to pytest (-m in it takes the place of "not slow") and to tests/soak.py
# GSYNC_BUILD, CXX, CUDA_HOME, TORCH_CUDA_ARCH_LIST, MAX_JOBS: see gsync/env.py

SHELL := /bin/sh
VENV ?= .venv
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11 python3.10,$(shell \
  $(name) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $(name))))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
NEWEST_TORCH := torch>=2.11,<2.15
TORCH ?= $(or $(shell cat $(VENV)/.torch 2>/dev/null),$(NEWEST_TORCH))
# One stamp per torch: asking for another one installs and builds again.
TORCH_STAMP := $(VENV)/.torch-$(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)
BUILT := $(VENV)/.built
CPP_FILES = $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: setup bench test test-all soak lint gpu coverage clean distclean

setup: $(BUILT)

$(BIN)/python:
	@test -n '$(PYTHON)' || { echo 'gsync needs Python 3.10 or newer; name one: make PYTHON=...'; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo 'gsync: $(PYTHON) -m venv failed; on Debian and Ubuntu: apt install python3-venv'; exit 1; }

$(TORCH_STAMP): | $(BIN)/python
	$(PIP) install --quiet 'setuptools>=77' wheel ninja '$(TORCH)'
	@rm -f $(VENV)/.torch-* $(BUILT)
	@printf '%s\n' '$(TORCH)' > $(VENV)/.torch
	@touch $@

# gsync/_build_info.py is written by every build of this tree: if another environment built it since, build again.
$(BUILT): $(TORCH_STAMP) setup.py build_plan.py pyproject.toml $(CPP_FILES) gsync/_build_info.py
	$(PIP) install --quiet --no-build-isolation --editable '.[dev]'
	@$(BIN)/python -c 'import gsync; print(f"gsync {gsync.__version__}: build {gsync._native.build_info().KIND}")'
	@touch $@

gsync/_build_info.py: ;

bench: setup
	$(BIN)/gsync bench $(BENCH_ARGS)

test: setup
	$(BIN)/python -m pytest -m 'not slow' $(PYTEST_ARGS)

test-all: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)

soak: setup
	$(BIN)/python tests/soak.py $(SOAK_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find csrc tests/emulation -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/mypy

gpu:
	@$(PYTHON) tests/gpu_lane.py

coverage: setup
	$(BIN)/python tests/coverage_report.py

clean:
	rm -rf build dist *.egg-info gsync/_build_info.py gsync/_C.*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find gsync kernels benchmarks tests -name __pycache__ -prune -exec rm -rf {} +
	rm -f .venv*/.built

distclean: clean
	rm -rf .venv .venv-cpu
