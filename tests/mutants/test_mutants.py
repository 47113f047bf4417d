"""A known fault that is put back is noticed. The campaign `mutants` runs all of them."""

from __future__ import annotations

import json

import pytest

from tests.mutants.__main__ import FAILED, main, run
from tests.mutants.known import MUTANTS
from tests.mutants.mutant import ROOT, Mutant

QUICK = "broken-prefix-is-cached"


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=list(MUTANTS))
def test_mutant_changes_the_product_and_names_a_test(mutant: Mutant) -> None:
    assert mutant.source() != (ROOT / mutant.path).read_text()
    path, _, name = mutant.test.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text()


def test_each_mutant_has_a_recorded_outcome() -> None:
    recorded = json.loads((ROOT / "benchmarks" / "results" / "mutants.json").read_text())
    outcomes = {name: (one["test"], one["is_caught"]) for name, one in recorded["mutants"].items()}
    assert outcomes == {name: (mutant.test, True) for name, mutant in MUTANTS.items()}
    assert recorded["caught"] == len(MUTANTS)


def test_quick_mutant_is_caught() -> None:
    outcome = run([MUTANTS[QUICK].test], MUTANTS[QUICK])
    assert outcome.returncode == FAILED, outcome.stdout


def test_a_run_without_the_changed_module_proves_nothing() -> None:
    test = f"tests/mutants/test_mutants.py::{test_unknown_mutant_is_refused.__name__}"
    outcome = run([test], MUTANTS["slot-of-a-running-request"])
    assert outcome.returncode not in (0, FAILED), outcome.stdout


def test_unknown_mutant_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["no-such-mutant"])
    assert "there is no mutant no-such-mutant" in capsys.readouterr().err
