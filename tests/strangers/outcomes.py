"""The committed list of expected outcomes of a suite, and its comparison with a run."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

KINDS = {
    "no such call": "a call that loramux does not have",
    "no such field": "a field of the peer's own that loramux refuses or does not answer with",
    "no such option": "an option of the peer's server, not a request",
    "OpenAI differs": "the test expects something other than OpenAI's or Anthropic's own API",
    "tiny model": "the demo's model cannot do what the test asks",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    test: str
    outcome: str
    """passed, failed or skipped"""
    reason: str


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures that have one reason."""

    kind: str
    reason: str
    tests: tuple[str, ...]
    """Tests, or the functions, files and folders that contain them."""

    def entry_for(self, test: str) -> str | None:
        for entry in self.tests:
            if test == entry or (test.startswith(entry) and test[len(entry)] in "/:["):
                return entry
        return None


@dataclass(frozen=True, slots=True)
class Expected:
    num_tests: int
    num_skipped: int
    failures: tuple[Failures, ...]


@dataclass(slots=True)
class Comparison:
    counts: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """One line per difference between the run and the list."""


def load(path: Path) -> Expected:
    """Read a list. Raise ValueError if a failure has an unknown kind or no reason, or if it is listed twice."""
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    failures = tuple(Failures(group["kind"], group["reason"], tuple(group["tests"])) for group in content["failures"])
    for group in failures:
        if group.kind not in KINDS or not group.reason.strip() or not group.tests:
            raise ValueError(f"{path.name}: {group} needs one of the kinds {', '.join(KINDS)}, a reason and tests")
    entries = Counter(entry for group in failures for entry in group.tests)
    if twice := [entry for entry, count in entries.items() if count > 1]:
        raise ValueError(f"{path.name}: listed twice: {', '.join(twice)}")
    return Expected(content["tests"], content["skipped"], failures)


def compare(expected: Expected, outcomes: Sequence[Outcome]) -> Comparison:
    compared = Comparison()
    compared.counts.update(outcome.outcome for outcome in outcomes)
    unused = {entry for group in expected.failures for entry in group.tests}
    for outcome in outcomes:
        listed = [group for group in expected.failures if group.entry_for(outcome.test)]
        if outcome.outcome == "failed" and not listed:
            compared.faults.append(f"{outcome.test} fails, and is not on the list: {first_line(outcome.reason)}")
        elif outcome.outcome == "passed" and listed:
            compared.faults.append(f"{outcome.test} passes, but is on the list: {listed[0].reason}")
        if outcome.outcome == "failed" and listed:
            compared.kinds[listed[0].kind] += 1
        unused -= {entry for group in listed if (entry := group.entry_for(outcome.test))}
    compared.faults += [f"{entry} is on the list, but there is no such test" for entry in sorted(unused)]
    if len(outcomes) != expected.num_tests:
        compared.faults.append(f"{len(outcomes)} tests ran, but the list records {expected.num_tests}")
    if compared.counts["skipped"] != expected.num_skipped:
        compared.faults.append(
            f"{compared.counts['skipped']} tests skipped, but the list records {expected.num_skipped}"
        )
    return compared


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]
