# make demo   train a small language model on this machine's Python sources, and continue a prompt with it
# make test   run the whole test suite
# make docs   write docs/models.md again, and the tables that are made from data and code
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo predict test lint docs wheel clean

# The virtual environment is complete when this file is newer than what it was made from.
$(VENV)/.complete: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/.complete
	$(BIN)/lightning-liger fit --config examples/tiny.yaml

predict: $(VENV)/.complete
	$(BIN)/lightning-liger predict --config examples/tiny.yaml --ckpt_path runs/tiny/checkpoints/last.ckpt --data.prompt "import os"

test: $(VENV)/.complete
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.complete
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.complete
	$(BIN)/python -m tests.lightning_liger.models_table docs/models.md
	$(BIN)/python -m tests.docs_sections

wheel: $(VENV)/.complete
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) build dist runs *.egg-info
