from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

import pytest

from loramux.adapter_store.registry.base_shares import BaseShare
from loramux.platform.base_draw import BaseDraw, drawn_order

KEYS = [f"ten_{number}:ada_{number % 7}" for number in range(4000)]
PROMPTS = "f" * 64


def shares(weights: Mapping[str, int], prompts: str | None = PROMPTS) -> list[BaseShare]:
    return [BaseShare(base_id=base, weight=weight, prompt_sha256=prompts) for base, weight in weights.items()]


@pytest.mark.parametrize(
    "weights",
    [{"a": 90, "b": 10}, {"a": 1, "b": 1}, {"a": 5, "b": 3, "c": 2}, {"a": 0, "b": 7, "c": 7}],
    ids=["90 to 10", "equal", "three bases", "drained"],
)
def test_bases_are_drawn_in_proportion_to_their_weights(weights: Mapping[str, int]) -> None:
    drawn = Counter(drawn_order(weights, key)[0] for key in KEYS)
    total = sum(weights.values())
    # Three standard deviations.
    assert {base: drawn[base] / len(KEYS) for base in weights} == pytest.approx(
        {base: weight / total for base, weight in weights.items()}, abs=0.024
    )


def test_keys_move_only_to_the_base_whose_weight_grows() -> None:
    steps = [{"a": 100, "b": 20, "new": weight} for weight in (0, 10, 100, 1_000_000)]
    drawn = [[drawn_order(weights, key)[0] for key in KEYS] for weights in steps]
    for before, after in itertools.pairwise(drawn):
        moved = [new for old, new in zip(before, after, strict=True) if new != old]
        assert set(moved) == {"new"}


def test_second_choice_is_drawn_in_proportion_too_and_drained_bases_come_last() -> None:
    orders = [drawn_order({"a": 6, "b": 3, "c": 1, "drained": 0}, key) for key in KEYS]
    assert {order[-1] for order in orders} == {"drained"}
    seconds = Counter(order[1] for order in orders if order[0] == "a")
    assert seconds["b"] / seconds.total() == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize(
    "given",
    [
        [],
        shares({"own": 1}),
        shares({"other": 1, "third": 1}),
        [*shares({"own": 1}), *shares({"other": 1}, "e" * 64)],
        [*shares({"own": 1}), *shares({"other": 1}, None)],
    ],
    ids=["no weights", "only the own base", "only other bases", "another tokenizer", "an unknown tokenizer"],
)
def test_requests_are_not_divided(given: list[BaseShare]) -> None:
    draw = BaseDraw("own", PROMPTS)
    draw.note_shares(given)
    assert draw.order("ten_1", None) is None
    assert draw.bases == ()


def test_a_tenants_requests_for_an_adapter_stay_with_one_base() -> None:
    draw = BaseDraw("own", PROMPTS)
    draw.note_shares(shares({"own": 1, "other": 1}))
    draw.note_live({"own", "other"})
    orders = {(tenant, adapter): draw.order(tenant, adapter) for tenant in "abcdefgh" for adapter in ("x", "y", None)}
    assert {order.drawn for order in orders.values() if order is not None} == {"own", "other"}
    assert all(draw.order(*key) == order for key, order in orders.items())


def test_bases_without_a_live_server_come_last() -> None:
    draw = BaseDraw("own", PROMPTS)
    draw.note_shares(shares({"own": 0, "other": 1}))
    draw.note_live({"own"})
    order = draw.order("ten_1", None)
    assert order is not None
    assert (order.drawn, order.bases, order.other) == ("other", ("own", "other"), None)
    draw.note_live({"own", "other"})
    order = draw.order("ten_1", None)
    assert order is not None
    assert (order.bases, order.other) == (("other", "own"), "other")
    assert order.among({"own"}).bases == ("own",)
    assert order.among(()).bases == ()
