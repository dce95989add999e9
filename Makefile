# The same commands that CI runs. Each one does its own set-up on a fresh machine with Python >= 3.11.
PYTHON ?= python3
TORCH_CPU_INDEX ?=
TORCH_ANY_BUILD ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
MODEL := smollm2-135m-instruct
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PACKAGES := splitserve coordinator prefill_worker decode_worker kv_transfer engine autoscaler bench

.PHONY: setup model demo test e2e-docker wheels check proto docs peer-vllm peer-dynamo clean help
.DEFAULT_GOAL := help

help: ## What can be made
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 12

setup: $(STAMP) ## .venv with splitserve in it
$(STAMP): pyproject.toml constraints.txt dev/install_torch.py
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python dev/install_torch.py $(if $(TORCH_CPU_INDEX),--cpu-index $(TORCH_CPU_INDEX)) $(if $(TORCH_ANY_BUILD),--any-build)
	$(PIP) --editable '.[dev]'
	touch $(STAMP)

model: setup ## The embedded model, in the local cache
	$(BIN)/splitserve model fetch $(MODEL)

demo: setup model ## One prefill and one decode worker, one streamed answer, clean exit
	$(BIN)/python -m dev.demo

test: setup model ## All tests that need neither Docker nor a GPU
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

e2e-docker: setup model ## The compose file on a real Docker Engine (installed and started if missing)
	$(BIN)/python -m dev.e2e_docker $(if $(TORCH_CPU_INDEX),--cpu-index $(TORCH_CPU_INDEX))

wheels: setup ## What the container image installs, downloaded into compose/wheels
	$(BIN)/python -m dev.docker_image $(if $(TORCH_CPU_INDEX),--cpu-index $(TORCH_CPU_INDEX))

check: setup ## Lint, types, import rules, protos
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/mypy $(PACKAGES) dev
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/python dev/proto.py --check
	$(BIN)/python -m dev.configuration_page --check

proto: setup ## Generate splitserve/v1 from protos/
	$(BIN)/python dev/proto.py

docs: setup ## Generate docs/configuration.md from the settings
	$(BIN)/python -m dev.configuration_page

peer-vllm: setup model ## vLLM's prefill/decode pair beside ours; vLLM gets an environment of its own
	$(BIN)/python bench/peers/vllm_setup.py $(if $(TORCH_CPU_INDEX),--cpu-index $(TORCH_CPU_INDEX))
	$(BIN)/python -m bench.peers.vllm_pair

peer-dynamo: setup model ## The coordinator beside NVIDIA Dynamo's frontend; Dynamo gets an environment of its own
	$(BIN)/python bench/peers/dynamo_setup.py
	$(BIN)/python -m bench.coordinator --parts tokens,dynamo --faces sse

clean: ## Remove the environment and caches
	rm -rf $(VENV) .peers build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
