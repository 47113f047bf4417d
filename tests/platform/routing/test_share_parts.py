from __future__ import annotations

from loramux.platform.routing.share_parts import ShareParts


def test_share_has_more_than_its_part_by_weight() -> None:
    shares = ShareParts()
    for _ in range(3):
        shares.start("light", 1)
    for _ in range(6):
        shares.start("heavy", 3)
    assert shares.has_more_than_its_part("light")
    assert not shares.has_more_than_its_part("heavy")


def test_only_active_shares_divide_the_whole() -> None:
    shares = ShareParts()
    shares.start("one", 1)
    shares.start("one", 1)
    shares.start("other", 1)
    assert shares.has_more_than_its_part("one")
    shares.end("other")
    assert not shares.has_more_than_its_part("one")
    assert not shares.has_more_than_its_part("other")


def test_latest_weight_holds() -> None:
    shares = ShareParts()
    shares.start("one", 1)
    shares.start("one", 9)
    shares.start("other", 1)
    assert not shares.has_more_than_its_part("one")
    for key in ("one", "one", "other", "other"):
        shares.end(key)
    shares.start("new", 1)
    assert not shares.has_more_than_its_part("new")
