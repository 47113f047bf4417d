from __future__ import annotations

import pytest

from loramux.platform.messages_api.signatures import sign, signed_thinking


@pytest.mark.parametrize("thinking", ["", "Hm.", "Größer?\n" * 50])
def test_a_signature_belongs_to_its_thinking(thinking: str) -> None:
    assert signed_thinking(thinking, sign(thinking)) == thinking
    assert signed_thinking(thinking + " ", sign(thinking)) is None


def test_a_signature_carries_omitted_thinking() -> None:
    signature = sign("Größer?", is_omitted=True)
    assert signed_thinking("", signature) == "Größer?"
    assert signed_thinking("Größer?", signature) is None, "a block has either its text or a signature that carries it"
    assert signed_thinking("", sign("Größer?")) is None


@pytest.mark.parametrize("forged", ["", "x", "EqQBCgIYAhIM", "é", "A" * 24, sign("Other."), sign("Other.")[:-2] + "=="])
def test_forged_signatures_are_noticed(forged: str) -> None:
    assert signed_thinking("Hm.", forged) is None
