# Every target makes its own environment in .venv; nothing else needs to be installed by hand.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE ?= 1
export HF_DATASETS_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo pictures test lint clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,plots]'
	touch $@

demo: .venv/installed  ## prune the embedded demo model to 20 % and score it
	$(BIN)/python -m eval.demo --output out/demo

pictures: .venv/installed  ## the README's: what `report` and `sweep` draw of the embedded demo model
	$(BIN)/python -m eval.pictures

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint  ## lint, types and all tests
	$(BIN)/python -m pytest

clean:
	rm -rf .venv out results *.egg-info .pytest_cache .ruff_cache .mypy_cache
