"""Campaigns, the long tests that run only on request: `make campaign NAME=fleet ARGS=...`.

`python -m tests.campaigns` lists them. This module imports only the standard library, because CI lists the campaigns
before the virtual environment exists.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ALL = "campaign or not campaign"


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    line: str
    commands: tuple[tuple[str, ...], ...]
    """Arguments of `python -m`, run in this order. The user's arguments are appended to the last command."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, used if the user sets no other value."""
    environment: str | None = None
    """The virtual environment of `tests.environments` in which the last command runs. None means this one."""
    is_nightly: bool = True
    """False if a plain machine without root cannot run it."""


def _pytest(
    *paths: str, marks: str = "campaign", timeout_s: int | None = 3600, is_shown: bool = False
) -> tuple[str, ...]:
    """Select tests by paths and markers, not by -k: a second -k, from the user, would replace the first."""
    timeout = () if timeout_s is None else ("--timeout", str(timeout_s))
    return ("pytest", *paths, "-m", marks, *timeout, *(("-s",) if is_shown else ()))


CAMPAIGNS: Mapping[str, Campaign] = {
    "kernels": Campaign(
        line="Long kernel tests at the sizes of real models, and compilation for each kind of GPU",
        commands=(_pytest("tests/kernels", "tests/gpu", "tests/engine/execution/test_compile_ahead.py"),),
    ),
    "instruction-sets": Campaign(
        line="The CPU kernels' tests with each instruction set that this CPU has or can emulate, 30 minutes "
        "(ARGS='--only avx2')",
        commands=(("tests.kernels.cpu.instruction_sets",),),
    ),
    "parity": Campaign(
        line="Every architecture against transformers and peft, on both devices' code paths",
        commands=(
            _pytest(
                "tests/conformance/test_parity.py",
                "tests/conformance/test_gpu_engine.py",
                "tests/conformance/test_activated.py",
                "tests/conformance/test_drafters.py",
                "tests/conformance/test_classifiers.py",
                "tests/conformance/test_pooled_prompts.py",
                "tests/conformance/test_trained_rows.py",
                "tests/conformance/test_trained_vectors.py",
                "tests/conformance/test_all_forms.py",
                "tests/conformance/test_quantized_bases.py",
                "tests/conformance/test_gguf_bases.py",
                "tests/conformance/test_added_tokens.py",
                "tests/conformance/test_added_tokens_served.py",
                "tests/conformance/test_multimodal_names.py",
                "tests/conformance/test_quantized_server.py",
                "tests/conformance/test_expert_adapters.py",
                "tests/conformance/test_random_expert_adapters.py",
                "tests/conformance/test_windows.py",
                "tests/conformance/test_long_contexts.py",
                "tests/conformance/test_quantized_experts.py",
                "tests/conformance/test_prompt_logprobs.py",
                "tests/conformance/test_hybrids.py",
                "tests/conformance/test_host_pages.py",
                "tests/conformance/test_token_rules.py",
                marks=ALL,
            ),
        ),
    ),
    "gguf": Campaign(
        line="Real models in GGUF files from PyPI (330 MB) against transformers",
        commands=(_pytest("tests/conformance/test_real_gguf.py"),),
    ),
    "simulation": Campaign(
        line="Long random runs of the engine on a simulated device (LORAMUX_SIMULATION_TURNS=10000)",
        commands=(_pytest("tests/simulation"),),
    ),
    "life": Campaign(
        line="A long random run of the engine with real weights (LORAMUX_LIFE_EVENTS=10000)",
        commands=(_pytest("tests/conformance/test_long_life.py"),),
    ),
    "drafts": Campaign(
        line="Answers, log-probabilities and bills with and without drafts and forced tokens, and the distribution of "
        "sampled tokens (LORAMUX_DRAFTED_REQUESTS=2000)",
        commands=(
            _pytest(
                "tests/conformance/test_drafts.py",
                "tests/conformance/test_draft_heads.py",
                "tests/engine/loop/test_drafts.py",
            ),
        ),
    ),
    "quotas": Campaign(
        line="Admission against a model made of plain dictionaries, on both databases (LORAMUX_QUOTA_STEPS=1500)",
        commands=(_pytest("tests/platform/quotas/test_quota_machine.py"),),
    ),
    "sampling": Campaign(
        line="Sampling at the extremes of its settings against float64 (LORAMUX_SAMPLING_EXAMPLES=3000)",
        commands=(_pytest("tests/engine/execution/test_sampling_extremes.py"),),
    ),
    "processes": Campaign(
        line="Servers and engines that hang, die, restart or stop early (LORAMUX_BATCH_LINES=500)",
        commands=(
            _pytest(
                "tests/platform/engine_link/test_supervision.py",
                "tests/platform/engine_link/test_joined_engine.py",
                "tests/admin/serving/test_serve.py",
                "tests/admin/serving/test_pulled_server.py",
                "tests/admin/serving/test_sharing.py",
                "tests/platform/batches/test_kills.py",
                "tests/conformance/test_staging_deaths.py",
                "tests/conformance/test_end_to_end.py",
                "tests/conformance/test_one_request_seen.py",
                "tests/conformance/demo_server/test_evals_served.py",
                "tests/admin/demo/test_demo.py",
                marks=ALL,
            ),
        ),
    ),
    "schemas": Campaign(
        line="Masks of random grammars against an oracle, and JSON Schema's own test suite against structured output "
        "(ARGS='--help' for sizes)",
        commands=(_pytest("tests/conformance/test_grammar_masks.py"), ("tests.conformance.schema_suite",)),
    ),
    "extensions": Campaign(
        line="Servers, and loramux's own tests of each kind, with the extensions of the documentation",
        commands=(_pytest("tests/docs/test_extension_example.py", "tests/docs/test_extending_page.py", marks=ALL),),
    ),
    "templates": Campaign(
        line="Hostile chat templates and histories, and the templates of 71 models compared with transformers "
        "(ARGS='--out FILE' for the counts)",
        commands=(
            _pytest(
                "tests/engine/chat_templates",
                "tests/platform/tokenizer",
                "tests/platform/openai_api/test_hostile_histories.py",
                marks=ALL,
            ),
            ("tests.conformance.chat_templates",),
        ),
    ),
    "gguf-tokenizers": Campaign(
        line="Tokenizers read from GGUF metadata against the originals and llama.cpp (ARGS='--help' for sizes)",
        commands=(("tests.environments", "gguf"), ("tests.conformance.gguf_tokenizers",)),
    ),
    "trainers": Campaign(
        line="251 directories as training programs write them, served equal to peft or refused "
        "(LORAMUX_TRAINER_COUNTS=FILE for the counts)",
        commands=(_pytest("tests/conformance/test_trainer_directories.py"),),
    ),
    "validation": Campaign(
        line="All hostile uploads, 20,000 random headers and 1,000 random peft configurations "
        "(LORAMUX_PEFT_COUNTS=FILE for the counts)",
        commands=(
            _pytest(
                "tests/adapter_store/validation",
                "tests/adapter_store/formats",
                "tests/conformance/test_peft_differential.py",
                is_shown=True,
            ),
        ),
    ),
    "api": Campaign(
        line="Random calls over both OpenAPI documents (LORAMUX_API_CASES=20000 LORAMUX_API_SEED=1)",
        commands=(_pytest("tests/admin/rest/test_api_conformance.py", timeout_s=36000, is_shown=True),),
    ),
    "ingest": Campaign(
        line="Servers killed at every step of ingestion, on both databases and both blob stores",
        commands=(_pytest("tests/adapter_store/ingest/test_ingest_crashes.py"),),
    ),
    "store-faults": Campaign(
        line="A running server while its S3 store fails in every way (LORAMUX_STORE_FAULTS=1000)",
        commands=(_pytest("tests/conformance/test_store_faults.py", timeout_s=None, is_shown=True),),
    ),
    "gateways": Campaign(
        line="Gateways that race, lose streams, are stopped and are killed "
        "(LORAMUX_GATEWAY_RACERS=1000 _CUTS=10000 _STOPS=1000 _KILLS=200)",
        commands=(
            _pytest(
                "tests/conformance/test_gateways.py",
                "tests/admin/serving/test_gateway.py",
                "tests/platform/generation/test_database_trouble.py",
                "tests/platform/generation/test_database_refusals.py",
                marks="campaign and not fleet and not cluster and not data_parallel",
                is_shown=True,
            ),
        ),
    ),
    "fleet": Campaign(
        line="Servers that share requests: kills, upgrades, lies, wrong clocks and the gateways' campaign "
        "(LORAMUX_FLEET_KILLS=100 _ENGINE_KILLS=20 _UPGRADES=6 _SEED=1)",
        commands=(
            _pytest(
                "tests/conformance/test_fleet.py",
                "tests/conformance/test_fleet_bases.py",
                "tests/conformance/test_hostile_peer.py",
                "tests/conformance/test_clocks.py",
                "tests/conformance/test_withdrawals.py",
                "tests/conformance/test_gateways.py",
                marks="campaign and fleet",
                is_shown=True,
            ),
        ),
        settings={
            "LORAMUX_GATEWAY_CUTS": "3000",
            "LORAMUX_GATEWAY_STOPS": "100",
            "LORAMUX_GATEWAY_KILLS": "40",
        },
    ),
    "data-parallel": Campaign(
        line="Servers with two engines: killed engines under load, and the gateways' campaign "
        "(LORAMUX_ENGINE_KILLS=10 LORAMUX_GATEWAY_CUTS=3000)",
        commands=(
            _pytest(
                "tests/conformance/test_data_parallel.py",
                "tests/conformance/test_gateways.py",
                "tests/admin/serving/test_local_engines.py",
                marks="campaign and data_parallel",
                is_shown=True,
            ),
        ),
        settings={
            "LORAMUX_GATEWAY_CUTS": "3000",
            "LORAMUX_GATEWAY_STOPS": "100",
            "LORAMUX_GATEWAY_KILLS": "40",
        },
    ),
    "tensor-parallel": Campaign(
        line="Engines of two and four workers against peft and one worker, long random runs "
        "(LORAMUX_LIFE_EVENTS=10000), and servers whose workers die at twelve points",
        commands=(
            _pytest(
                "tests/conformance/test_tensor_parallel.py",
                "tests/conformance/test_tensor_parallel_bases.py",
                "tests/conformance/test_parallel_life.py",
                "tests/admin/serving/test_tensor_parallel_server.py",
                "tests/admin/serving/test_dying_workers.py",
            ),
        ),
    ),
    "mutants": Campaign(
        line="Known faults, most of them of other servers, put back one by one; each must be caught by its test",
        commands=(("tests.mutants", "--out", "benchmarks/results/mutants.json"),),
    ),
    "cluster": Campaign(
        line="Engines in a local Ray cluster: kills, changes of size and settings, a lost head, and the gateways' "
        "campaign (LORAMUX_CLUSTER_KILLS=100 LORAMUX_CLUSTER_FIGURES=FILE)",
        commands=(
            ("tests.environments", "cluster"),
            _pytest(
                "tests/cluster",
                "tests/conformance/test_gateways.py",
                marks="campaign and cluster",
                timeout_s=36000,
                is_shown=True,
            ),
        ),
        settings={
            "LORAMUX_CLUSTER_KILLS": "100",
            "LORAMUX_GATEWAY_CUTS": "3000",
            "LORAMUX_GATEWAY_STOPS": "100",
            "LORAMUX_GATEWAY_KILLS": "40",
        },
        environment="cluster",
    ),
    "batches": Campaign(
        line="A batch over many adapters on a whole server, undisturbed and with kills "
        "(LORAMUX_SERVED_LINES=10000 _ADAPTERS=500 _KILLS=50)",
        commands=(_pytest("tests/conformance/test_batches_served.py", timeout_s=None, is_shown=True),),
    ),
    "full-disk": Campaign(
        line="A disk that is filled and freed during streams; needs root to mount it (LORAMUX_DISK_RUNS=100 _SEED=1)",
        commands=(
            _pytest(
                "tests/conformance/test_filling_disk.py", "tests/platform/generation/test_full_disk.py", is_shown=True
            ),
        ),
        is_nightly=False,
    ),
    "docs": Campaign(
        line="Every command in the documentation",
        commands=(_pytest("tests/docs/test_pages.py"),),
    ),
    "s3": Campaign(
        line="The blob stores' long tests on moto, with 1,000 faults",
        commands=(
            _pytest(
                "tests/adapter_store/blobs/test_s3_blobs.py",
                "tests/adapter_store/blobs/test_s3_faults.py",
                "tests/adapter_store/tiers/test_store_faults.py",
            ),
        ),
    ),
    "sessions": Campaign(
        line="The console's sessions on PostgreSQL",
        commands=(_pytest("tests/admin/console/sessions/test_sessions.py"),),
    ),
    "reliability": Campaign(
        line="Small runs of rows of docs/reliability.md that no other campaign covers: hostile adapters, disconnects, "
        "faults of the database, and mutated files (ARGS='--runs 500000')",
        commands=(
            _pytest(
                "tests/reliability/test_isolation.py",
                "tests/reliability/test_disconnects.py",
                "tests/conformance/test_database_faults.py",
            ),
            ("tests.reliability.fuzzing", "--runs", "100000"),
        ),
        settings={
            "LORAMUX_ISOLATION_REQUESTS": "500",
            "LORAMUX_DISCONNECTS": "500",
            "LORAMUX_DATABASE_FAULTS": "600",
        },
    ),
    "rollups": Campaign(
        line="Processes killed in the middle of a rollup, on both databases (LORAMUX_FOLD_KILLS=200)",
        commands=(_pytest("tests/platform/ledger/test_rollup_crashes.py", is_shown=True),),
    ),
    "adversary": Campaign(
        line="Attacks on a running server while a polite tenant uses it, on both databases (ARGS='--help' for sizes)",
        commands=(("tests.adversary",),),
    ),
    "real": Campaign(
        line="Two real models from the Python package index in every format of weights, and the real demo: equality, "
        "long contexts, quality, memory and speed (ARGS='--only equality')",
        commands=(("tests.environments", "gguf"), ("tests.real",)),
    ),
    "benchmarks": Campaign(
        line="Every part of the benchmarks once, at small sizes, on the CPU",
        commands=(_pytest("tests/benchmarks"),),
    ),
}


def main(arguments: Sequence[str]) -> int:
    """List the campaigns or run one. Return the exit status of its first command that fails, otherwise 0."""
    if arguments and arguments[0] in CAMPAIGNS:
        return _run(CAMPAIGNS[arguments[0]], arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", nargs="?", choices=CAMPAIGNS, metavar="NAME", help="a campaign, then its arguments")
    parser.add_argument("--nightly", action="store_true", help="print the names that CI runs, as JSON")
    if parser.parse_args(arguments).nightly:
        print(json.dumps([name for name, campaign in CAMPAIGNS.items() if campaign.is_nightly]))
        return 0
    width = max(map(len, CAMPAIGNS))
    for name, campaign in CAMPAIGNS.items():
        print(f"  {name:{width}}  {campaign.line}")
    return 0


def _run(campaign: Campaign, more: Sequence[str]) -> int:
    unset = {name: value for name, value in campaign.settings.items() if not os.environ.get(name)}
    *first, last = campaign.commands
    python = sys.executable if campaign.environment is None else f".venv-{campaign.environment}/bin/python"
    for interpreter, command in (*((sys.executable, one) for one in first), (python, (*last, *more))):
        done = subprocess.run([interpreter, "-m", *command], env={**os.environ, **unset}, check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
