from __future__ import annotations

from tests.docs.request_fields_page import MEANINGS, known_fields


def test_every_known_field_has_a_meaning_and_no_other() -> None:
    assert set(MEANINGS) == known_fields()
