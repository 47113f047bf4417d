"""What a paced engine noted about its sequences, which the ledger is checked against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec


class NotedEnd(msgspec.Struct, frozen=True):
    """A sequence that has ended."""

    sequence_id: str
    prompt_tokens: int
    outputs: tuple[int, ...]
    """The number of tokens in each output. A stop token, which is not sent, is the last."""
    drafts: Mapping[str, tuple[int, int]] = {}
    """The numbers of drafted and accepted tokens by source."""

    @property
    def completion_tokens(self) -> int:
        return sum(self.outputs)


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """The numbers of drafted and accepted tokens by source."""

    drafted: Counter[str]
    accepted: Counter[str]

    @staticmethod
    def of(ends: Iterable[NotedEnd]) -> DraftCounts:
        drafted: Counter[str] = Counter()
        accepted: Counter[str] = Counter()
        for end in ends:
            for source, (num_drafted, num_accepted) in end.drafts.items():
                drafted[source] += num_drafted
                accepted[source] += num_accepted
        return DraftCounts(drafted, accepted)

    @staticmethod
    def total(counts: Iterable[DraftCounts]) -> DraftCounts:
        counts = tuple(counts)
        return DraftCounts(
            sum((one.drafted for one in counts), Counter()), sum((one.accepted for one in counts), Counter())
        )

    def __str__(self) -> str:
        counts = (f"{num} from {source} ({self.accepted[source]} accepted)" for source, num in self.drafted.items())
        return f"drafts: {', '.join(sorted(counts)) or 'none'}"

    def rejected(self, source: str) -> int:
        return self.drafted[source] - self.accepted[source]


def read_ends(file: Path) -> Iterator[NotedEnd]:
    for line in file.read_bytes().splitlines():
        yield msgspec.json.decode(line, type=NotedEnd)
