# Each target creates the virtual environment it needs. `make help` lists the targets.
VENV ?= .venv
# Records the Python and constraints of the environment until `make clean`. The file is absent before `make venv`.
MADE_WITH := $(VENV)/.made-with
-include $(MADE_WITH)
PYTHON ?= $(or $(MADE_PYTHON),python3.11)
CONSTRAINTS ?= $(or $(MADE_CONSTRAINTS),constraints.txt)
LOCK := constraints.lock
BROWSER_LOCK := constraints-browser.lock
IMAGE_LOCK := platform/deploy/container/requirements.lock
RAY_LOCK := platform/deploy/container/ray.lock
ARGS ?=
NAME ?=
READY := $(VENV)/.ready
WARM := $(VENV)/.warm
DEPLOY := .venv-deploy
S3_TESTS := tests/adapter_store/blobs/test_blobs.py tests/adapter_store/blobs/test_s3_blobs.py \
	tests/adapter_store/blobs/test_s3_faults.py tests/adapter_store/tiers/test_store_faults.py \
	tests/adapter_store/tiers/test_packed_source.py
HASHED := --require-hashes --no-deps --only-binary :all:
BROWSER := greenlet|playwright
COMPILE := .venv-lock/bin/uv pip compile --quiet --no-header --no-annotate --python-version 3.11
# Add the hashes to pins. The index URL is left out.
ADD_HASHES := $(COMPILE) - --no-deps --generate-hashes --only-binary :all: --no-emit-index-url
# Print the pins whose names match $(2), with hashes. With -v as $(1), print the others.
hashes_of = grep == constraints.txt | grep -E $(1) '^($(2))==' | $(ADD_HASHES)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Without bytecode, each process compiles hundreds of files again.
unexport PYTHONDONTWRITEBYTECODE
# Idle OpenMP threads spin briefly and then sleep, as in the engine process, because other processes need the cores.
export OMP_WAIT_POLICY ?= passive
export GOMP_SPINCOUNT ?= 10000

.DEFAULT_GOAL := help
# Every target that `make help` lists is phony.
.PHONY: $(shell sed -n 's/^\([a-z0-9-]*\):.*\#\# .*/\1/p' $(firstword $(MAKEFILE_LIST)))

##@ Start here

help: ## List the targets
	@awk -F ':.*## ' '/^##@ / {printf "\n%s\n", substr($$0, 5)} \
		/^[a-z0-9-]+:.*## / {printf "  make %-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(WARM) ## Create the virtual environment (PYTHON=python3.11 CONSTRAINTS=constraints.txt)

# First install every package with a hash, as wheels only, so that no code runs unchecked. Then install torch and its
# dependencies, whose builds differ between machines, and this checkout. docs/security.md says why.
$(READY): pyproject.toml $(CONSTRAINTS) $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { \
		echo "$(PYTHON) is not Python 3.11, 3.12 or 3.13: choose another, such as PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet $(HASHED) -r $(LOCK)
	$(VENV)/bin/python -m pip install --quiet --no-build-isolation -c $(CONSTRAINTS) -e '.[demo,dev]'
	@printf 'MADE_PYTHON := %s\nMADE_CONSTRAINTS := %s\n' '$(PYTHON)' '$(CONSTRAINTS)' > $(MADE_WITH)
	@touch $@

# Refuse other values, because a rebuild could silently replace a GPU environment.
ifdef MADE_PYTHON
ifneq ($(PYTHON) $(CONSTRAINTS),$(MADE_PYTHON) $(MADE_CONSTRAINTS))
$(READY): refuse-other-values
.PHONY: refuse-other-values
refuse-other-values:
	@echo "$(VENV) was made with PYTHON=$(MADE_PYTHON) CONSTRAINTS=$(MADE_CONSTRAINTS): run 'make clean' first" >&2
	@exit 2
endif
endif

# Compile the CPU kernels once, so that servers start without waiting for them.
$(WARM): $(READY) $(wildcard kernels/*.py kernels/cpu/*.py kernels/cpu/*/*.py)
	$(VENV)/bin/python -m loramux.kernels.cpu.warm
	@touch $@

demo: $(WARM) ## Serve three tenants' adapters in one batch (ARGS=--real: a real model; ARGS='--tools --exit': tool calls, and exit after the report)
	@$(VENV)/bin/loramux demo $(ARGS)

##@ Work on the code

check: $(READY) ## Run linters, type checks and import checks
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/codespell
	$(VENV)/bin/python -m tests.docs.phrases
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(READY) ## Format the code
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# Run three test files at a time on two cores, because many tests wait for a process or clock. Tests in a file share
# fixtures.
# Without the last option, files with few tests, which take longest, would run last, and one process would be idle.
test: $(WARM) ## Run the tests, 10 minutes on two cores
	$(VENV)/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: $(WARM) ## Run the tests that start no process and need no database server, under 90 seconds
	$(VENV)/bin/python -m tests.fast $(ARGS)

test-changed: $(WARM) ## Run the tests of what changed since main (ARGS='--list' only names them)
	$(VENV)/bin/python -m tests.changed $(ARGS)

docs: $(READY) ## Generate the pages of docs/ that come from the program
	$(VENV)/bin/python -m tests.docs.write

lock: ## Write the hashes of the packages pinned in constraints.txt
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet uv==0.13.9
	$(call hashes_of,-v,$(BROWSER)|torch|triton) > $(LOCK).new && mv $(LOCK).new $(LOCK)
	$(call hashes_of,,$(BROWSER)) > $(BROWSER_LOCK).new && mv $(BROWSER_LOCK).new $(BROWSER_LOCK)
	echo hatchling | $(COMPILE) pyproject.toml - --extra traces -c constraints.txt | \
		grep -v -E '^(torch|triton|cuda-.*|nvidia-.*)==' | $(ADD_HASHES) > $(IMAGE_LOCK).new && mv $(IMAGE_LOCK).new $(IMAGE_LOCK)
	$(COMPILE) pyproject.toml --extra traces --extra cluster -c constraints.txt | grep -v -E '^(torch|triton|cuda-.*|nvidia-.*)==' | \
		grep -v -x -F "$$(grep -o '^[^ ]*==[^ ]*' $(IMAGE_LOCK))" | $(ADD_HASHES) > $(RAY_LOCK).new && mv $(RAY_LOCK).new $(RAY_LOCK)

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

##@ Tests against other programs

test-docs: $(WARM) ## Run every command in the documentation
	$(VENV)/bin/python -m pytest tests/docs -m 'campaign or not campaign' $(ARGS)

test-package: $(WARM) ## Check the wheel and sdist, and run the demo from a wheel (LORAMUX_PYTHONS='python3.11 python3.13')
	$(VENV)/bin/python -m pytest tests/layout/test_package.py -m campaign $(ARGS)

test-clients: $(WARM) ## Test unmodified OpenAI clients and agent frameworks against a server (needs npm)
	$(VENV)/bin/python -m tests.environments clients
	$(VENV)/bin/python -m tests.environments sentences
	$(VENV)/bin/python -m pytest tests/clients -m campaign $(ARGS)

test-cluster: $(WARM) ## Test engines in a local Ray cluster: end to end, kills, drains, changes, 4 minutes (LORAMUX_CLUSTER_KILLS=3)
	$(VENV)/bin/python -m tests.environments cluster
	.venv-cluster/bin/python -m pytest tests/cluster -m campaign --timeout 600 -s $(ARGS)

test-strangers: $(WARM) ## Run vLLM's, SGLang's and openai-python's own tests of a server against ours (ARGS='--only vllm')
	$(VENV)/bin/python -m tests.environments strangers
	$(VENV)/bin/python -m tests.strangers $(ARGS)

test-harnesses: $(WARM) ## Compare lm-eval with its own backend and loramux bench with vLLM's, and run guidellm, aiperf and TRL (ARGS='--only lm-eval')
	$(VENV)/bin/python -m tests.environments harnesses
	$(VENV)/bin/python -m tests.harnesses $(ARGS)

test-browser: $(WARM) ## Test the console in Debian's Chromium (installed if root)
	$(VENV)/bin/python -m pip install --quiet $(HASHED) -r $(BROWSER_LOCK)
	$(VENV)/bin/python -m tests.browser.browser_tools
	$(VENV)/bin/python -m pytest tests/browser tests/admin/console/sessions/test_sessions.py -m campaign $(ARGS)

test-s3: $(WARM) ## Test the blob stores, with 1,000 faults, on moto and a real radosgw (Debian's, installed if root)
	$(VENV)/bin/python -m tests.adapter_store.blobs.radosgw
	$(VENV)/bin/python -m pytest $(S3_TESTS) -m campaign --timeout 3600 $(ARGS)
	LORAMUX_TEST_S3=radosgw $(VENV)/bin/python -m pytest $(S3_TESTS) \
		-m 'campaign or not campaign' --timeout 3600 $(ARGS)

test-oidc: $(WARM) ## Sign in through a real OpenID provider (npm oidc-provider 8.8.1, needs Node 18 or later)
	npm install --no-audit --no-fund --ignore-scripts --prefix $(VENV)/oidc oidc-provider@8.8.1
	LORAMUX_TEST_OIDC=$(VENV)/oidc/node_modules $(VENV)/bin/python -m pytest tests/admin/console/oidc/test_oidc.py \
		-m 'campaign or not campaign' --timeout 600 $(ARGS)

test-container: $(READY) ## Check the deployment recipes, and run the Dockerfile's steps in a chroot of Debian (as root)
	$(VENV)/bin/python -m tests.environments deploy
	$(DEPLOY)/bin/hadolint platform/deploy/container/Dockerfile
	$(DEPLOY)/bin/shellcheck platform/deploy/*/*.sh
	$(DEPLOY)/bin/check-jsonschema --builtin-schema vendor.compose-spec platform/deploy/compose/compose.yaml
	$(DEPLOY)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/python -m tests.platform.deploy.debian_packages
	$(VENV)/bin/python -m pytest tests/platform/deploy -m campaign --timeout 3600 -s $(ARGS)

test-prometheus: $(WARM) ## Evaluate the dashboard and alerts on a real Prometheus (Debian's, installed if root)
	$(VENV)/bin/python -m tests.conformance.prometheus_server
	$(VENV)/bin/python -m pytest tests/conformance/test_prometheus.py -m campaign --timeout 600 -s $(ARGS)

test-gpu: $(READY) ## Run everything that needs a GPU, 9 minutes (CONSTRAINTS=constraints-cuda.txt ARGS='--only kernels' or '--interpret')
	$(VENV)/bin/python -m tests.gpu $(ARGS)

##@ Campaigns and benchmarks, by name

campaign: $(if $(NAME),$(WARM),$(READY)) ## Run a long test (NAME=fleet ARGS=...), or list them all
	@$(VENV)/bin/python -m tests.campaigns $(NAME) $(ARGS)

reliability: $(WARM) ## Run the rows of docs/reliability.md (ARGS='--size tiny --only kills'; full takes days)
	@$(VENV)/bin/python -m tests.reliability $(ARGS)

# A GPU machine needs no CPU kernels.
bench: $(if $(filter-out gpu%,$(NAME)),$(WARM),$(READY)) ## Run a benchmark (NAME=mixed-batch ARGS='--help'), or list them all
	@$(VENV)/bin/python -m benchmarks $(NAME) $(ARGS)

gpu-plan: $(READY) ## List the runs that a GPU should make next (ARGS='--card h200 --wheels')
	@$(VENV)/bin/python -m benchmarks.gpu.plan $(ARGS)
