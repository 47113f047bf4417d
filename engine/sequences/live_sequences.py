"""Unfinished sequences, by gateway and by adapter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from loramux.engine.sequences.sequence import Sequence


class LiveSequences:
    """Finds sequences by gateway and id, or by adapter. Two gateways may use the same id."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[bytes, str], Sequence] = {}
        # Use dictionaries, not sets, so that the order in which sequences end does not depend on memory addresses.
        self._by_digest: defaultdict[str, dict[Sequence, None]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Sequence]:
        """A snapshot in order of arrival. The caller may end sequences while iterating."""
        return iter(list(self._by_key.values()))

    def add(self, sequence: Sequence) -> None:
        key = sequence.owner, sequence.sequence_id
        assert key not in self._by_key
        self._by_key[key] = sequence
        if sequence.add.digest is not None:
            self._by_digest[sequence.add.digest][sequence] = None

    def remove(self, sequence: Sequence) -> None:
        del self._by_key[sequence.owner, sequence.sequence_id]
        digest = sequence.add.digest
        if digest is not None:
            del self._by_digest[digest][sequence]
            if not self._by_digest[digest]:
                del self._by_digest[digest]

    def find(self, owner: bytes, sequence_id: str) -> Sequence | None:
        return self._by_key.get((owner, sequence_id))

    def wants(self, digest: str) -> bool:
        """True if any live sequence needs the adapter."""
        return digest in self._by_digest

    def of_digest(self, digest: str) -> list[Sequence]:
        return list(self._by_digest.get(digest, ()))
