"""A trainer that publishes each policy to the server: TRL's AsyncGRPOTrainer, without changes.

The server must answer every rollout with the policy that the trainer named, and its log-probabilities must be those of
the trainer's own forward pass.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tests.conformance.served import deployment
from tests.harnesses.finding import Finding
from tests.harnesses.tools import INSIDE, run_tool
from tests.strangers.stand import CHAT

NUM_STEPS = 20
LARGEST_KL = 1e-6
"""Bound for the first step, whose samples come from the policy that is being trained. The estimator is quadratic in the
difference of two log-probabilities, so it bounds the typical difference by about 1e-3.
"""


def trl(scratch: Path) -> Iterator[Finding]:
    base, output = CHAT[0], scratch / "policies"
    settings = {"LORAMUX_LOAD_SOURCES": f"file://{output}"}
    made = deployment(base, scratch / "data", ("--dtype", "float32"), settings)
    with made.running(scratch / "server.log"):
        made.json("tenants", "create", "lab")
        scopes = [part for scope in ("adapters", "base", "tenant:develop") for part in ("--scope", scope)]
        key = made.json("keys", "create", "--tenant", "lab", *scopes)["secret"]
        command = ["python", str(INSIDE / "trl_train.py"), "--url", f"http://trainer:{key}@127.0.0.1:{made.port}"]
        command += ["--base", str(base), "--output", str(output), "--steps", str(NUM_STEPS)]
        run_tool("trl", command, scratch, paths=(INSIDE / "trl_stand_ins",))
        names = [adapter["name"] for adapter in made.json("adapters", "list", "--tenant", "lab")["data"]]
    steps = [entry for entry in json.loads((output / "log.json").read_text()) if "kl" in entry]
    expected = {f"trl-policy-v{number}" for number in range(1, NUM_STEPS + 1)}
    is_right = len(steps) == NUM_STEPS and expected <= set(names)
    yield Finding("trl", "steps", f"{len(steps)}, {len(names)} policies", f"{NUM_STEPS}", is_right)
    kl = steps[0]["kl"]
    yield Finding("trl", "log-probabilities", f"KL {kl:.1e}", f"at most {LARGEST_KL:.0e}", 0 <= kl <= LARGEST_KL)
    rewards = [step["reward"] for step in steps]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    yield Finding("trl", "reward", f"{first:.3f} to {last:.3f}", "grows", last > first)
