# Each target makes the virtual environment it needs; `make help` lists what there is.
PYTHON ?= python3.11
CONSTRAINTS ?= constraints.txt
LOCK := constraints.lock
BROWSER_LOCK := constraints-browser.lock
VENV ?= .venv
ARGS ?=
READY := $(VENV)/.ready
WARM := $(VENV)/.warm
CLIENTS := .venv-clients
S3_TESTS := tests/adapter_store/blobs/test_blobs.py tests/adapter_store/blobs/test_s3_blobs.py \
	tests/adapter_store/blobs/test_s3_faults.py tests/adapter_store/tiers/test_store_faults.py \
	tests/adapter_store/tiers/test_packed_source.py
HASHED := --require-hashes --no-deps --only-binary :all:
BROWSER := greenlet|playwright
# The wheels of the pins whose names fit, or with -v do not fit; no line says where they come from.
hashes_of = grep == constraints.txt | grep -E $(1) '^($(2))==' | .venv-lock/bin/uv pip compile - --quiet --no-deps \
	--generate-hashes --only-binary :all: --no-header --no-annotate --no-emit-index-url --python-version 3.11

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Idle OpenMP threads spin for a moment and then sleep, as in the engine process, since others use the cores too.
export OMP_WAIT_POLICY ?= passive
export GOMP_SPINCOUNT ?= 10000

.DEFAULT_GOAL := help
# Whatever `make help` lists is no file.
.PHONY: $(shell sed -n 's/^\([a-z0-9-]*\):.*\#\# .*/\1/p' $(firstword $(MAKEFILE_LIST)))

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(WARM) ## Make the virtual environment (PYTHON=python3.11 CONSTRAINTS=constraints.txt)

# First all that has a hash, as wheels alone, so that nothing runs before it is checked. What is left is torch with what
# it brings, of which every machine has its own build, and this checkout: docs/security.md says why.
$(READY): pyproject.toml $(CONSTRAINTS) $(LOCK)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet $(HASHED) -r $(LOCK)
	$(VENV)/bin/python -m pip install --quiet --no-build-isolation -c $(CONSTRAINTS) -e '.[demo,dev]'
	@touch $@

lock: ## Write the hashes of what constraints.txt pins, from the package index
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet uv==0.13.9
	$(call hashes_of,-v,$(BROWSER)|torch|triton) > $(LOCK).new && mv $(LOCK).new $(LOCK)
	$(call hashes_of,,$(BROWSER)) > $(BROWSER_LOCK).new && mv $(BROWSER_LOCK).new $(BROWSER_LOCK)

# The CPU's kernels are compiled once, so that no server start has to wait for them.
$(WARM): $(READY) $(wildcard kernels/*.py kernels/cpu/*.py)
	$(VENV)/bin/python -m loramux.kernels.cpu.warm
	@touch $@

demo: $(WARM) ## Serve three tenants' adapters in one batch (ARGS=--exit to stop after the report)
	@$(VENV)/bin/loramux demo $(ARGS)

# Two files of tests at a time: many wait for a process, a disk or a clock. A file's tests share their fixtures.
test: $(WARM) ## Run the tests, under 10 minutes on two cores
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile $(ARGS)

campaign-kernels: $(WARM) ## The long kernel tests, real models' sizes (ARGS='-k NAME' for some)
	$(VENV)/bin/python -m pytest tests/kernels tests/gpu -m campaign --timeout 3600 $(ARGS)

campaign-parity: $(WARM) ## Every architecture beside transformers and peft, on both paths (ARGS='-k NAME' for some)
	$(VENV)/bin/python -m pytest tests/conformance/test_parity.py tests/conformance/test_gpu_engine.py \
		-m 'campaign or not campaign' --timeout 3600 $(ARGS)

campaign-simulation: $(WARM) ## Long random lives of the engine on a simulated device (LORAMUX_SIMULATION_TURNS=10000)
	$(VENV)/bin/python -m pytest tests/simulation -m campaign --timeout 3600 $(ARGS)

campaign-life: $(WARM) ## A long random life of the engine with real weights (LORAMUX_LIFE_EVENTS=10000)
	$(VENV)/bin/python -m pytest tests/conformance/test_long_life.py -m campaign --timeout 3600 $(ARGS)

campaign-quotas: $(WARM) ## Admission beside plain dictionaries for long, on both databases (LORAMUX_QUOTA_STEPS=1500)
	$(VENV)/bin/python -m pytest tests/platform/quotas/test_quota_machine.py -m campaign --timeout 3600 $(ARGS)

campaign-sampling: $(WARM) ## Sampling at the ends of its settings against float64 (LORAMUX_SAMPLING_EXAMPLES=3000)
	$(VENV)/bin/python -m pytest tests/engine/execution/test_sampling_extremes.py -m campaign --timeout 3600 $(ARGS)

campaign-processes: $(WARM) ## Servers and engines that hang, die, are joined, restarted and stopped in a hurry
	$(VENV)/bin/python -m pytest tests/platform/engine_link/test_supervision.py tests/platform/engine_link/test_joined_engine.py \
		tests/admin/test_serve.py -m 'campaign or not campaign' --timeout 3600 $(ARGS)

campaign-validation: $(WARM) ## The whole hostile catalogue in its process, 20,000 headers, 300 peft configurations
	$(VENV)/bin/python -m pytest tests/adapter_store tests/conformance/test_peft_differential.py \
		-m campaign -k 'hostile or header or largest or peft' --timeout 3600 -s $(ARGS)

campaign-api: $(WARM) ## Random calls over both OpenAPI documents (LORAMUX_API_CASES=20000 LORAMUX_API_SEED=1)
	$(VENV)/bin/python -m pytest tests/admin/rest/test_api_conformance.py -m campaign --timeout 36000 -s $(ARGS)

campaign-ingest: $(WARM) ## Servers killed at every step of the ingestion, on both databases and both blob stores
	$(VENV)/bin/python -m pytest tests/adapter_store/ingest/test_ingest_crashes.py -m campaign --timeout 3600 $(ARGS)

campaign-store-faults: $(WARM) ## A running server while its S3 store fails in every way (LORAMUX_STORE_FAULTS=1000)
	$(VENV)/bin/python -m pytest tests/conformance/test_store_faults.py -m campaign -s $(ARGS)

campaign-gateways: $(WARM) ## Gateways raced, cut, stopped and killed (LORAMUX_GATEWAY_RACERS=1000 _CUTS=10000 _STOPS=1000 _KILLS=200)
	$(VENV)/bin/python -m pytest tests/conformance/test_gateways.py tests/admin/test_gateway.py \
		tests/platform/generation/test_database_trouble.py tests/platform/generation/test_database_refusals.py \
		-m campaign -s --timeout 3600 $(ARGS)

campaign-full-disk: $(WARM) ## A disk that fills and empties under streams; root mounts it (LORAMUX_DISK_RUNS=100 _SEED=1)
	$(VENV)/bin/python -m pytest tests/conformance/test_filling_disk.py -m campaign -s --timeout 3600 $(ARGS)

campaign-rollups: $(WARM) ## Processes killed in the middle of a fold, on both databases (LORAMUX_FOLD_KILLS=200)
	$(VENV)/bin/python -m pytest tests/platform/ledger/test_rollup_crashes.py -m campaign -s --timeout 3600 $(ARGS)

campaign-adversary: $(WARM) ## Attack a running server on both databases beside a polite tenant (ARGS='--help' for sizes)
	$(VENV)/bin/python -m tests.adversary $(ARGS)

bench-first-token: $(WARM) ## Measure what quotas add to the time to first token (ARGS='--help' for sizes)
	$(VENV)/bin/python -m benchmarks.accounts.first_token $(ARGS)

campaign-benchmarks: $(WARM) ## Every part of the benchmarks once, small, on the CPU
	$(VENV)/bin/python -m pytest tests/benchmarks -m campaign --timeout 3600 $(ARGS)

test-gpu: $(READY) ## All that needs a GPU, 9 minutes (CONSTRAINTS=constraints-cuda.txt ARGS='--only kernels' or '--interpret')
	$(VENV)/bin/python -m tests.gpu $(ARGS)

test-browser: $(WARM) ## The console in Debian's Chromium over a running demo (installed where root may)
	$(VENV)/bin/python -m pip install --quiet $(HASHED) -r $(BROWSER_LOCK)
	$(VENV)/bin/python -m tests.browser.browser_tools
	$(VENV)/bin/python -m pytest tests/browser tests/admin/console/sessions/test_sessions.py -m campaign $(ARGS)

# The clients have an environment of their own, so that our pins stay clean; npm brings the Node client.
$(CLIENTS)/.ready: tests/clients/requirements.txt tests/clients/package.json
	@command -v npm >/dev/null || { echo "npm is needed for the Node client: apt-get install nodejs npm" >&2; exit 1; }
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet -r tests/clients/requirements.txt
	mkdir -p $(CLIENTS)/node && cp tests/clients/package.json $(CLIENTS)/node/
	cd $(CLIENTS)/node && npm install --no-audit --no-fund --loglevel error
	@touch $@

test-clients: $(WARM) $(CLIENTS)/.ready ## openai for Python and Node, litellm and langchain-openai against a running server
	$(VENV)/bin/python -m pytest tests/clients -m campaign $(ARGS)

docs: $(READY) ## Write the pages of docs/ that come from the program itself
	$(VENV)/bin/python -m tests.docs.write

test-docs: $(WARM) ## Type every command that the documentation says to type
	$(VENV)/bin/python -m pytest tests/docs -m 'campaign or not campaign' $(ARGS)

test-package: $(WARM) ## What wheel and sdist hold, and the demo from a wheel (LORAMUX_PYTHONS='python3.11 python3.13')
	$(VENV)/bin/python -m pytest tests/layout/test_package.py -m campaign $(ARGS)

test-s3: $(WARM) ## The blob stores and 1,000 faults on moto and on a real radosgw (Debian's, installed where root may)
	$(VENV)/bin/python -m tests.adapter_store.blobs.radosgw
	$(VENV)/bin/python -m pytest $(S3_TESTS) -m campaign --timeout 3600 $(ARGS)
	LORAMUX_TEST_S3=radosgw $(VENV)/bin/python -m pytest $(S3_TESTS) \
		-m 'campaign or not campaign' --timeout 3600 $(ARGS)

test-oidc: $(WARM) ## Single sign-on through a real OpenID provider (npm oidc-provider 8.8.1, needs node 18 or later)
	npm install --no-audit --no-fund --ignore-scripts --prefix $(VENV)/oidc oidc-provider@8.8.1
	LORAMUX_TEST_OIDC=$(VENV)/oidc/node_modules $(VENV)/bin/python -m pytest tests/admin/console/oidc/test_oidc.py \
		-m 'campaign or not campaign' --timeout 600 $(ARGS)

test-prometheus: $(WARM) ## Dashboard and alerts on a real Prometheus that scrapes a server under load (Debian's, installed where root may)
	$(VENV)/bin/python -m tests.conformance.prometheus_server
	$(VENV)/bin/python -m pytest tests/conformance/test_prometheus.py -m campaign --timeout 600 -s $(ARGS)

check: $(READY) ## Lint, types, layers
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(READY) ## Format the code
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(WARM) ## Measure loramux beside peft, one run, one table (ARGS='--help' for sizes)
	$(VENV)/bin/python -m benchmarks.mixed_batch $(ARGS)

bench-gpu: $(READY) ## Measure kernels and engine on a GPU, 9 minutes (CONSTRAINTS=constraints-cuda.txt PART=lora ARGS='--out FILE')
	$(VENV)/bin/python -m benchmarks.gpu $(if $(PART),--only $(PART)) $(ARGS)

bench-gpu-table: $(READY) ## Count launches and bytes of steps without a GPU (ARGS='--card h200 --out FILE')
	$(VENV)/bin/python -m benchmarks.gpu.table $(ARGS)

bench-gpu-dry: $(READY) ## List what each case of bench-gpu needs of a card, without one (ARGS='--card h100 --out FILE')
	$(VENV)/bin/python -m benchmarks.gpu --dry-run $(if $(PART),--only $(PART)) $(ARGS)

bench-s-lora: $(WARM) ## Measure throughput over 5 to 2,000 adapters on disk, 9 minutes (ARGS='--help' for settings)
	$(VENV)/bin/python -m benchmarks.s_lora $(ARGS)

bench-flood: $(WARM) ## Measure what polite accounts see of one that floods (ARGS='--help' for settings)
	$(VENV)/bin/python -m benchmarks.tenants.flood $(ARGS)

bench-cold-storm: $(WARM) ## Measure what running streams see of 200 adapters that come at once (ARGS='--help' for settings)
	$(VENV)/bin/python -m benchmarks.tenants.cold_storm $(ARGS)

bench-registry: $(READY) ## Measure what a name costs among 100,000 versions, on both databases (ARGS='--help' for sizes)
	$(VENV)/bin/python -m benchmarks.accounts.registry $(ARGS)

bench-admin-lists: $(READY) ## Measure the admin API's lists over 100,000 versions, on both databases (ARGS='--help' for sizes)
	$(VENV)/bin/python -m benchmarks.accounts.admin_lists $(ARGS)

bench-usage-report: $(READY) ## Measure reports over 10 million requests, on both databases (ARGS='--help' for sizes)
	$(VENV)/bin/python -m benchmarks.accounts.usage_report $(ARGS)

bench-console-pages: $(READY) ## Measure the console's pages over 10 million requests (ARGS='--help' for sizes)
	$(VENV)/bin/python -m benchmarks.accounts.console_pages $(ARGS)

bench-admission: $(READY) ## Measure quota reserved and settled, one by one and by group commit, on both databases
	$(VENV)/bin/python -m benchmarks.accounts.admission $(ARGS)

bench-simulation: $(READY) ## Count the engine's steps a second on a simulated device (ARGS='--running 64')
	$(VENV)/bin/python -m benchmarks.simulation $(ARGS)

bench-hot-load: $(READY) ## Measure adapters from the disk tier to the pool beside plain reads (ARGS='--help' for sizes)
	$(VENV)/bin/python -m benchmarks.hot_load $(ARGS)

bench-peers: $(WARM) ## Measure loramux beside peft, vLLM and llama-server over HTTP (benchmarks/peers/README.md)
	$(VENV)/bin/python -m benchmarks.peers $(ARGS)

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
