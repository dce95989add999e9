# The same commands that CI runs. Each one does its own set-up on a fresh machine with Python >= 3.11.
PYTHON ?= python3
TORCH_CPU_INDEX ?=
TORCH_ANY_BUILD ?=
DOCS_CHECK ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
VLLM_VERSION ?= 0.32
VLLM := .venv-vllm$(if $(filter-out 0.32,$(VLLM_VERSION)),-$(VLLM_VERSION))
MODEL := smollm2-135m-instruct
PYTEST := $(BIN)/python -m pytest
JOBS ?= 3
ALONE := $(shell grep -rl 'mark\.alone' tests/integration)
SIDE_BY_SIDE := -n $(JOBS) --dist loadfile --no-loadscope-reorder
SEARCHING := SPLITSERVE_HYPOTHESIS_PROFILE=search SPLITSERVE_FUZZ_EXAMPLES=250 SPLITSERVE_TEST_REFERENCES=sampled
PACKAGES := splitserve coordinator prefill_worker decode_worker worker kv_transfer engine autoscaler launcher bench

# Images often set it. Without it each module is compiled once, not in every process that a test starts.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup setup-vllm model libraries demo test test-all test-vllm test-vllm-all e2e-docker e2e-docker-image wheels release test-wheel check check-types check-rules proto docs docs-check docs-site peer-vllm peer-dynamo clean help
.DEFAULT_GOAL := help

help: ## What can be made
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 12

setup: $(STAMP) ## .venv with splitserve in it
$(STAMP): pyproject.toml constraints.txt dev/install_torch.py dev/installer.py
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m dev.install_torch --no-compile $(if $(TORCH_CPU_INDEX),--cpu-index $(TORCH_CPU_INDEX)) $(if $(TORCH_ANY_BUILD),--any-build)
	$(BIN)/python -m dev.installer --no-compile --constraint constraints.txt --editable '.[cpu,dev]'
	touch $(STAMP)

setup-vllm: $(VLLM)/.setup-stamp ## .venv-vllm with vLLM's CPU build, splitserve and its tests
$(VLLM)/.setup-stamp: $(STAMP) dev/vllm_environment.py
	$(BIN)/python -m dev.vllm_environment --folder $(VLLM) --version $(VLLM_VERSION) --splitserve $(if $(TORCH_CPU_INDEX),--cpu-index $(TORCH_CPU_INDEX))
	touch $@

model: setup ## The embedded model, in the local cache
	$(BIN)/splitserve model fetch $(MODEL)

demo: setup model ## One prefill and one decode worker, one streamed answer, clean exit
	$(BIN)/splitserve demo

# Outside of tests' time limits.
libraries: setup
	$(BIN)/python -m dev.system.debian libibverbs1
	$(BIN)/python -m dev.system.helm

test: setup model libraries ## The tests that need neither Docker nor a GPU nor a quiet machine, without the long ones
	$(PYTEST) $(SIDE_BY_SIDE) -m 'not docker and not vllm and not wheel and not slow and not alone'

test-all: setup model libraries ## All tests that need neither Docker nor a GPU, with searches for new examples
	$(SEARCHING) $(PYTEST) $(SIDE_BY_SIDE) -m 'not docker and not vllm and not wheel and not alone'
	$(SEARCHING) $(PYTEST) $(ALONE) -m 'alone and not docker and not vllm'

test-vllm: setup-vllm model ## The tests of `--engine vllm`, without the long ones; VLLM_VERSION: with another one
	$(VLLM)/bin/python -m pytest $(SIDE_BY_SIDE) -m 'vllm and not slow' tests/integration/vllm

test-vllm-all: setup-vllm model ## All tests of `--engine vllm`
	$(VLLM)/bin/python -m pytest $(SIDE_BY_SIDE) -m vllm tests/integration/vllm

e2e-docker: setup model ## The compose file on a real Docker Engine (installed and started if missing)
	$(BIN)/python -m dev.e2e_docker $(if $(TORCH_CPU_INDEX),--cpu-index $(TORCH_CPU_INDEX))

e2e-docker-image: setup ## Only the image that `make e2e-docker` tests
	$(BIN)/python -m dev.e2e_docker --image-only $(if $(TORCH_CPU_INDEX),--cpu-index $(TORCH_CPU_INDEX))

wheels: setup ## What the container image installs, downloaded into compose/wheels
	$(BIN)/python -m dev.docker_image $(if $(TORCH_CPU_INDEX),--cpu-index $(TORCH_CPU_INDEX))

release: setup ## Source archive, wheel and list of parts (SBOM) in dist/, reproducibly
	$(BIN)/python -m dev.release

test-wheel: setup model ## What a wheel installs into a fresh environment
	$(BIN)/python -m dev.system.debian g++ binutils
	$(PYTEST) -m wheel tests/integration/wheel

check: setup ## Lint, types, import rules, protos
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target check-types check-rules

check-types: setup
	$(BIN)/mypy $(PACKAGES) dev

check-rules: setup
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/python dev/proto.py --check
	$(BIN)/python -m dev.docs.configuration_page --check
	$(BIN)/python -m dev.docs.api_page --check
	$(BIN)/python -m dev.monitoring.dashboards --check

proto: setup ## Generate splitserve/v1 from protos/
	$(BIN)/python dev/proto.py

docs: setup ## Generate docs/reference/configuration.md, docs/reference/api.md and the Grafana dashboards
	$(BIN)/python -m dev.docs.configuration_page
	$(BIN)/python -m dev.docs.api_page
	$(BIN)/python -m dev.monitoring.dashboards

docs-check: setup model ## Every command of README and docs, run once from a clean clone (DOCS_CHECK=--quick: no benches)
	$(BIN)/python -m dev.docs.check $(DOCS_CHECK)

docs-site: $(VENV)/.docs-stamp ## The documentation as a static site in build/site, with checked links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
$(VENV)/.docs-stamp: $(STAMP)
	$(BIN)/python -m dev.installer --no-compile --constraint constraints.txt --editable '.[docs]'
	touch $@

peer-vllm: setup model ## vLLM's prefill/decode pair beside ours; vLLM gets an environment of its own
	$(BIN)/python -m dev.vllm_environment --folder .peers/vllm $(if $(TORCH_CPU_INDEX),--cpu-index $(TORCH_CPU_INDEX))
	$(BIN)/python -m bench.peers.vllm_pair

peer-dynamo: setup model ## The coordinator beside NVIDIA Dynamo's frontend; Dynamo gets an environment of its own
	$(BIN)/python bench/peers/dynamo_setup.py
	$(BIN)/python -m bench.front_door --parts tokens,dynamo --entrypoints sse

clean: ## Remove the environment and caches
	rm -rf $(VENV) .venv-vllm* .peers build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
