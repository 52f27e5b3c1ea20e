# make demo   train a small language model on this machine's Python sources, and continue a prompt with it
# make test   run the whole test suite
# make lowest the same with the oldest torch and transformers that pyproject.toml allows, in an environment of its own
# make newest the same with the newest releases, past the bounds of pyproject.toml too
# make gpu    run the tests that need GPUs
# make history measure the ops and the loss on a GPU, into a folder history/ with a file for each commit
# make docs   write docs/models.md again, and the tables that are made from data and code
# make site   build the documentation site into build/site; warnings are errors
# make smoke  build sdist and wheel, install the wheel into an empty environment, and train two steps with it
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo predict test lowest newest gpu history lint docs site wheel smoke clean

# The virtual environment is complete when this file is newer than what it was made from.
$(VENV)/.complete: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)/.docs: $(VENV)/.complete
	$(BIN)/python -m pip install --quiet --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

demo: $(VENV)/.complete
	$(BIN)/lightning-liger fit --config examples/tiny.yaml
	@printf '\nWhat to try next:\n'
	@printf '\n  # %s\n  %s\n' \
	  'the model continues a prompt' 'make predict' \
	  'instruction tuning, in seconds' '$(BIN)/lightning-liger fit --config examples/sft.yaml' \
	  'the memory of a larger model, and what fits' '$(BIN)/lightning-liger inspect llama --gpu h100-80gb'

predict: $(VENV)/.complete
	$(BIN)/lightning-liger predict --config examples/tiny.yaml --ckpt_path runs/tiny/checkpoints/last.ckpt --data.prompt "import os"

test: $(VENV)/.complete
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

$(VENV)-lowest/.complete: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-lowest/bin/python -m pip install --quiet --constraint constraints-lowest.txt --editable '.[dev]'
	touch $@

lowest: $(VENV)-lowest/.complete
	$(VENV)-lowest/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# In a new environment each time: what is newest changes. pip only warns of versions past our bounds.
newest:
	$(PYTHON) -m venv --clear $(VENV)-newest
	$(VENV)-newest/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-newest/bin/python -m pip install --quiet --editable '.[dev]'
	$(VENV)-newest/bin/python -m pip install --quiet --upgrade torch transformers lightning liger-kernel
	$(VENV)-newest/bin/python -m pip list --format freeze
	$(VENV)-newest/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

gpu: $(VENV)/.complete
	$(BIN)/python -m pytest -m "gpu or multi_gpu"

$(VENV)/.bench: $(VENV)/.complete
	$(BIN)/python -m pip install --quiet --quiet --constraint constraints.txt --editable '.[bench]'
	touch $@

history: $(VENV)/.bench
	$(BIN)/python -m benchmarks ops --no-sweeps --out history/$$(git log -1 --format=%cs_%h)_ops
	$(BIN)/python -m benchmarks loss --out history/$$(git log -1 --format=%cs_%h)_loss

lint: $(VENV)/.complete
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.complete
	$(BIN)/python -m tests.lightning_liger.models_table docs/models.md
	$(BIN)/python -m benchmarks.docs_sections

site: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(VENV)/.complete
	rm -rf dist && mkdir dist
	$(BIN)/python -m build --no-isolation >dist/build.log 2>&1 || { cat dist/build.log; exit 1; }
	rm dist/build.log

smoke: wheel
	$(BIN)/python .ci/smoke.py dist/*.whl

clean:
	rm -rf $(VENV) build dist runs *.egg-info
