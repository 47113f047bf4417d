"""Puts each known fault back and runs the test that must catch it: `python -m tests.mutants [NAME ...] [--out FILE]`.

Each selected test must also pass on the unchanged product.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.known import MUTANTS
from tests.mutants.mutant import ENVIRONMENT, ROOT, Mutant
from tests.reliability.record import recorded

FAILED = 1
"""pytest's exit status if a selected test failed."""


def run(tests: Sequence[str], mutant: Mutant | None = None) -> subprocess.CompletedProcess[str]:
    """Run tests in a process of their own, with a mutant or with the unchanged product."""
    plugin = [] if mutant is None else ["-p", "tests.mutants.plugin"]
    settings = {} if mutant is None else {ENVIRONMENT: mutant.name}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *plugin, *tests],
        cwd=ROOT,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(MUTANTS)}; all by default")
    parser.add_argument("--out", type=Path, help="write the outcomes to this JSON file")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.names if name not in MUTANTS]
    if unknown:
        parser.error(f"there is no mutant {', '.join(unknown)}")
    mutants = [MUTANTS[name] for name in arguments.names] or list(MUTANTS.values())
    sound = run(list(dict.fromkeys(mutant.test for mutant in mutants)))
    if sound.returncode:
        print(sound.stdout)
        print("the tests fail on the unchanged product, so they can prove nothing")
        return 1
    caught: dict[str, bool] = {}
    with recorded("mutants") as figures:
        for number, mutant in enumerate(mutants, 1):
            started = time.monotonic()
            outcome = run([mutant.test], mutant)
            caught[mutant.name] = outcome.returncode == FAILED
            word = "caught" if caught[mutant.name] else f"NOT CAUGHT (pytest ended with {outcome.returncode})"
            print(f"{number:>2}/{len(mutants)} {mutant.name}: {word}, {time.monotonic() - started:.0f} s", flush=True)
            if outcome.returncode not in (0, FAILED):
                print(outcome.stdout)
        figures |= {"mutants": len(caught), "missed": len(caught) - sum(caught.values())}
    print(f"{sum(caught.values())} of {len(caught)} mutants were caught")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        outcomes = {
            mutant.name: {"fault": mutant.fault, "test": mutant.test, "is_caught": caught[mutant.name]}
            for mutant in mutants
        }
        arguments.out.write_text(json.dumps({"caught": sum(caught.values()), "mutants": outcomes}, indent=1) + "\n")
    return 0 if all(caught.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
