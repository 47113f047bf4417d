from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from loramux.adapter_store.registry.base_shares import BaseShare
from loramux.platform.base_draw import BaseDraw
from loramux.platform.replicas.certificates import LIFETIME_S, OwnCertificates
from loramux.platform.replicas.replica_book import FORGOTTEN_S, GONE_S, ReplicaBook
from loramux.platform.replicas.replica_table import Summary, TableReading
from loramux.platform.replicas.residency import (
    MAX_ADAPTERS,
    SummaryRefused,
    read_summary,
    summarise,
)
from loramux.platform.routing.views import digest_prefix
from tests.platform.ready_adapters import digest_of
from tests.platform.replicas.lab import PROMPTS, own_row
from tests.platform.scripted_engine import ScriptedEngine

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
PEM = OwnCertificates("rep_b", lambda: NOON).pem
NAMES_A = OwnCertificates("rep_a", lambda: NOON).pem
OWN, OTHER = "a" * 64, "b" * 64


def changed(part: bytes, replacement: bytes) -> str:
    """The certificate with another part in its DER form."""
    der = x509.load_pem_x509_certificate(PEM.encode()).public_bytes(serialization.Encoding.DER)
    return ssl.DER_cert_to_PEM_cert(der.replace(part, replacement, 1))


NO_VERSION = changed(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x7e")
NOT_UTF8 = changed(b"rep_b", b"rep\xff_")


class Observed:
    """A book with a clock and one other server, whose row the test changes."""

    def __init__(self) -> None:
        self.clock_s = 100.0
        self.now = NOON
        self.refusals: Counter[str] = Counter()
        own = own_row("rep_a", ScriptedEngine(base_sha256=OWN))
        self.shares: tuple[BaseShare, ...] = ()
        self.book = ReplicaBook(own, BaseDraw(OWN, PROMPTS), self.count, lambda: self.clock_s, lambda: self.now)
        self.row: Mapping[str, Any] = msgspec.structs.asdict(
            own_row("rep_b", ScriptedEngine(base_sha256=OWN), certificates=PEM)
        )

    def count(self, reason: str) -> None:
        self.refusals[reason] += 1

    def read(
        self, summary: Summary | None = None, after_s: float = 1.0, is_alive: bool = True, **changes: Any
    ) -> list[str]:
        """Let the book note one reading, and return the peers that it then has."""
        self.clock_s += after_s
        beat = self.row["beat"] + is_alive
        self.row = {**self.row, "beat": beat, **changes}
        summaries = {} if summary is None else {"rep_b": summary}
        self.book.note(TableReading(rows=[self.row], summaries=summaries, shares=self.shares))
        return list(self.book.peers)


@pytest.fixture
def observed() -> Observed:
    return Observed()


def test_replica_is_alive_while_its_beat_changes(observed: Observed) -> None:
    assert observed.read() == ["rep_b"]
    assert observed.book.peers["rep_b"].since_s == observed.clock_s
    for _ in range(int(GONE_S)):
        assert observed.read(is_alive=False) == ["rep_b"]
    assert observed.read(is_alive=False) == []
    assert observed.read() == ["rep_b"]
    # A beat that decreases is a change, too. Beats are compared only for equality.
    assert observed.read(beat=0, is_alive=False) == ["rep_b"]


def test_long_gap_between_two_readings_ages_nobody(observed: Observed) -> None:
    observed.read()
    assert observed.read(after_s=3600.0, is_alive=False) == ["rep_b"]
    assert not observed.book.forgotten


def test_row_of_a_dead_server_is_forgotten(observed: Observed) -> None:
    observed.read(beat=7)
    for _ in range(int(FORGOTTEN_S / 2) + 1):
        assert not observed.book.forgotten
        observed.read(after_s=2.0, is_alive=False)
    assert observed.book.forgotten == {"rep_b": 7}


@pytest.mark.parametrize(
    ("changes", "reason", "said"),
    [
        pytest.param({"base": "0" * 64}, "base", "another base model", id="another base"),
        pytest.param({"version": "9"}, "version", "it runs loramux 9", id="another version"),
        pytest.param({"protocol": 1}, "protocol", "it speaks protocol 1", id="another protocol"),
        pytest.param({"certificates": "nonsense"}, "certificate", "cannot be read", id="no certificate"),
        pytest.param({"certificates": NAMES_A}, "certificate", "names another server", id="another's certificate"),
        pytest.param({"certificates": NO_VERSION}, "certificate", "cannot be read", id="no version"),
        pytest.param({"certificates": NOT_UTF8}, "certificate", "cannot be read", id="unreadable for OpenSSL"),
        pytest.param({"address": "nowhere"}, "malformed", "values that no server writes", id="no port"),
        pytest.param({"capacity": 0}, "malformed", "values that no server writes", id="no capacity"),
        pytest.param({"num_pages": "many"}, "malformed", "values that no server writes", id="a text as a number"),
        pytest.param({"state": "asleep"}, "malformed", "values that no server writes", id="an unknown state"),
    ],
)
def test_other_servers_are_refused_once_with_a_sentence(
    observed: Observed, changes: Mapping[str, Any], reason: str, said: str
) -> None:
    good = {name: observed.row[name] for name in changes}
    for _ in range(3):
        assert observed.read(**changes) == []
    assert said in observed.book.refused["rep_b"]
    assert observed.refusals == {reason: 1}
    assert observed.read(**good) == ["rep_b"]
    assert not observed.book.refused


@pytest.mark.parametrize(
    ("shares", "is_accepted"),
    [
        pytest.param({}, False, id="no weights"),
        pytest.param({OWN: 50, OTHER: 50}, True, id="both bases"),
        pytest.param({OWN: 100, OTHER: 0}, True, id="a weight of 0"),
        pytest.param({OWN: 50, "c" * 64: 50}, False, id="a third base"),
        pytest.param({OTHER: 50, "c" * 64: 50}, False, id="other bases"),
    ],
)
def test_servers_of_other_bases_are_accepted_while_requests_are_divided(
    observed: Observed, shares: Mapping[str, int], is_accepted: bool
) -> None:
    observed.shares = tuple(
        BaseShare(base_id=base_id, weight=weight, prompt_sha256=PROMPTS) for base_id, weight in shares.items()
    )
    assert observed.read(base="0" * 64, base_id=OTHER) == (["rep_b"] if is_accepted else [])
    # A server with the own base in another format is no other version.
    assert observed.read(base="0" * 64, base_id=OWN) == []
    observed.shares = ()
    assert observed.read(base="0" * 64, base_id=OTHER) == []
    assert observed.refusals == {"base": 1}


def test_expired_certificate_is_refused(observed: Observed) -> None:
    assert observed.read() == ["rep_b"]
    observed.now += timedelta(seconds=LIFETIME_S + 1)
    assert observed.read() == []
    assert observed.refusals == {"certificate": 1}


@pytest.mark.parametrize(
    "summary",
    [
        pytest.param(b"\0" * 8 * (MAX_ADAPTERS + 1), id="oversized"),
        pytest.param(b"123456789", id="cut off"),
        pytest.param(b"\xff" * 8 + b"\0" * 8, id="not sorted"),
        pytest.param(b"\0" * 16, id="a prefix twice"),
    ],
)
def test_forged_summary_claims_nothing(observed: Observed, summary: bytes) -> None:
    good = summarise([digest_of("one")])
    observed.read(Summary(version=1, prefixes=good))
    assert observed.book.peers["rep_b"].holds == read_summary(good)
    assert observed.read(Summary(version=2, prefixes=summary)) == ["rep_b"]
    assert observed.book.peers["rep_b"].holds == frozenset()
    assert observed.refusals == {"summary": 1}
    assert observed.book.summary_versions == {"rep_b": 2}


def test_summary_has_at_most_the_allowed_adapters() -> None:
    digests = [digest_of(str(number)) for number in range(MAX_ADAPTERS + 10)]
    held = read_summary(summarise(digests))
    assert len(held) == MAX_ADAPTERS
    assert held < {digest_prefix(digest) for digest in digests}
    with pytest.raises(SummaryRefused):
        read_summary(summarise(digests) + b"\xff" * 8)
