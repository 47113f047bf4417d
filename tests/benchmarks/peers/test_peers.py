from __future__ import annotations

import contextlib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.answers import CheckError
from benchmarks.peers.agreement import check_work, compare, require_effect
from benchmarks.peers.figures import Cell, best_peer, is_hopeless, near_the_best, ratios, tokens_per_second
from benchmarks.peers.http_questions import completion_body, require_lengths
from benchmarks.peers.model_files import ModelFiles
from benchmarks.peers.system import LORAMUX, Running, System, SystemFailed
from benchmarks.peers.vocabulary import FIRST_BYTE, FIRST_WORD, token_id_of, write_tokenizer
from benchmarks.peers.workload import (
    ATTENTION,
    BASE,
    DISTINCT,
    KINDS,
    PEER_KINDS,
    SAME,
    Load,
    Question,
    adapters_of,
    draw_work,
)
from benchmarks.random_model import SHAPES
from loramux.admin.bench.pictures import draw_bars
from loramux.engine.text.text_tokenizer import TokenBytes

SHORT, LONG = Load(64, 32), Load(32, 128)


def never_opened(files: ModelFiles, is_check: bool) -> contextlib.AbstractContextManager[Running]:
    raise AssertionError("figures do not need a running system")


def plain(name: str, dtype: str = "float32") -> System:
    return System(name, dtype, KINDS if name == LORAMUX else PEER_KINDS, never_opened)


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    return ModelFiles(tmp_path, SHAPES["small"], num_adapters=4, rank=16)


@pytest.mark.parametrize("text", ["64", "0/32", "64/0", "64/32/1", "a/b", "400/200"])
def test_invalid_load_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a load|is impossible"):
        Load.parse(text)


def test_same_seed_draws_the_same_work_and_other_work_shares_no_prompt() -> None:
    drawn = draw_work(DISTINCT, SHORT, 4, 32000, "round 0")
    assert drawn == draw_work(DISTINCT, SHORT, 4, 32000, "round 0")
    others = [draw_work(DISTINCT, SHORT, 4, 32000, "round 1"), draw_work(SAME, SHORT, 4, 32000, "round 0")]
    beginnings = [question.prompt[:16] for work in (drawn, *others) for question in work.questions]
    assert len(set(beginnings)) == 12
    assert {len(question.prompt) for question in drawn.questions} == {64}
    assert all(FIRST_WORD <= token < 32000 for question in drawn.questions for token in question.prompt)
    assert drawn.num_tokens == 4 * 32


def test_kind_determines_the_requested_adapters() -> None:
    assert adapters_of(BASE, 2) == [None, None]
    assert adapters_of(DISTINCT, 2) == ["a0", "a1"]
    assert adapters_of(SAME, 2) == ["a0", "a0"]
    assert adapters_of(ATTENTION, 2) == ["attention0", "attention1"]
    with pytest.raises(ValueError, match="unheard of"):
        adapters_of("unheard of", 2)


def test_each_token_has_a_unique_spelling_that_maps_back_to_its_id(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 400)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 400
    token_bytes = TokenBytes(tokenizer)
    for token_id in range(400):
        spelled = token_bytes.of(token_id)
        try:
            shown = spelled.decode()
        except UnicodeDecodeError:
            shown = f"bytes:\\x{spelled[0]:02x}"
        assert token_id_of(shown) == token_id
    assert tokenizer.decode([FIRST_WORD, FIRST_BYTE + ord("!")]) == f" w{FIRST_WORD}!"
    with pytest.raises(ValueError, match="not a token"):
        token_id_of("two words")


def test_completion_body_requests_greedy_decoding_of_a_fixed_length() -> None:
    assert completion_body(Question((5, 6), None), 32, "base") == {
        "model": "base",
        "prompt": [5, 6],
        "max_tokens": 32,
        "temperature": 0.0,
        "ignore_eos": True,
    }


def test_answer_of_the_wrong_length_is_an_error() -> None:
    work = draw_work(BASE, SHORT, 2, 32000, "x")
    require_lengths("a server", [32, 32], work)
    with pytest.raises(SystemFailed, match="a server answered"):
        require_lengths("a server", [32, 31], work)


def test_speed_is_the_median_and_the_best_peer_can_have_any_dtype() -> None:
    fast, slow, own = plain("vLLM", "bfloat16"), plain("vLLM"), plain(LORAMUX)
    samples = {
        Cell(fast, SHORT, BASE): [1.0, 2.0, 9.0],
        Cell(slow, SHORT, BASE): [4.0],
        Cell(own, SHORT, BASE): [0.5],
    }
    speeds = tokens_per_second(samples, num_questions=16)
    assert speeds[Cell(fast, SHORT, BASE)] == 256.0
    assert best_peer(speeds, SHORT, BASE) == Cell(fast, SHORT, BASE)
    assert best_peer(speeds, LONG, BASE) is None


def test_ratios_compare_with_the_best_peer_and_overheads_with_our_own_base() -> None:
    own, peft, vllm = plain(LORAMUX, "bfloat16"), plain("peft"), plain("vLLM")
    own_speeds = {BASE: 110.0, DISTINCT: 100.0, SAME: 90.0, ATTENTION: 99.0}
    speeds = {Cell(own, SHORT, kind): speed for kind, speed in own_speeds.items()}
    speeds |= {Cell(peft, SHORT, kind): 40.0 for kind in PEER_KINDS}
    speeds |= {Cell(vllm, SHORT, BASE): 100.0, Cell(vllm, SHORT, SAME): 80.0}
    found = {ratio.name: ratio for ratio in ratios(speeds, speeds, [SHORT])}
    base = found["base only over the best peer"]
    assert (base.value, base.against, base.is_met) == (1.1, "vLLM, float32", True)
    distinct = found["distinct adapters over the best peer"]
    assert (distinct.value, distinct.against, distinct.target, distinct.is_met) == (2.5, "peft, float32", 2.6, False)
    assert found["one adapter over the best peer"].is_met is False
    seven = found["overhead of distinct adapters, all seven linears"]
    assert (seven.value, seven.target, seven.is_met) == (pytest.approx(0.1), 0.15, True)
    attention = found["overhead of distinct adapters, q/k/v/o"]
    assert (attention.value, attention.target, attention.is_met) == (pytest.approx(1 / 9), 0.10, False)


@pytest.mark.parametrize(("load", "target"), [(SHORT, 0.15), (LONG, 0.22), (Load(16, 8), None)], ids=str)
def test_overhead_has_the_target_of_its_load(load: Load, target: float | None) -> None:
    found = {ratio.name: ratio for ratio in ratios({}, {}, [load])}
    assert found["overhead of distinct adapters, all seven linears"].target == target
    assert found["overhead of distinct adapters, q/k/v/o"].target == (None if target is None else 0.10)
    assert all(ratio.value is None and ratio.is_met is None for ratio in found.values())


def test_near_the_best_omits_slow_cells_of_the_same_kind() -> None:
    fast, near, far = (Cell(plain(name), SHORT, BASE) for name in ("fast", "near", "far"))
    alone = Cell(plain("far"), SHORT, SAME)
    assert near_the_best({fast: 100.0, near: 71.0, far: 69.0, alone: 1.0}) == {fast, near, alone}


def test_check_uses_the_same_prompts_for_every_kind(files: ModelFiles) -> None:
    prompts = {tuple(question.prompt for question in check_work(kind, files).questions) for kind in KINDS}
    assert len(prompts) == 1


def test_equal_answers_are_counted_by_kind() -> None:
    reference = {BASE: ((1, 2), (3, 4)), SAME: ((5, 6), (7, 8))}
    agreement = compare(reference, {BASE: ((1, 2), (3, 9)), SAME: ((5, 6), (7, 8))})
    assert (agreement.equal, agreement.share, agreement.is_whole) == ({BASE: 1, SAME: 2}, 0.75, False)
    assert str(agreement) == "base only 1 of 2, one adapter 2 of 2"
    assert compare(reference, reference).is_whole


def test_adapter_that_changes_no_answer_fails_the_check() -> None:
    require_effect({BASE: ((1, 2), (3, 4)), SAME: ((1, 3), (5, 4))})
    with pytest.raises(CheckError, match="base's own"):
        require_effect({BASE: ((1, 2), (3, 4)), SAME: ((1, 3), (3, 4))})


def test_dtype_is_hopeless_only_relative_to_the_same_peer_and_work() -> None:
    slow = Cell(plain("peft", "bfloat16"), SHORT, BASE)
    samples = {slow: [10.0], Cell(plain("vLLM"), SHORT, BASE): [1.0], Cell(plain("peft"), SHORT, SAME): [1.0]}
    assert not is_hopeless(slow, samples)
    assert not is_hopeless(slow, {**samples, Cell(plain("peft"), SHORT, BASE): [3.6]})
    assert is_hopeless(slow, {**samples, Cell(plain("peft"), SHORT, BASE): [3.4]})


def test_picture_has_one_bar_per_measured_figure() -> None:
    panels = {"64/32": {BASE: {"ours": 100.0, "theirs": 50.0}, SAME: {"ours": 80.0}}}
    drawn = ElementTree.fromstring(draw_bars("a & b", panels, ["ours", "theirs"]))
    rectangles = [element for element in drawn.iter() if element.tag.endswith("rect")]
    background, *others = rectangles
    assert background.get("fill") == "white"
    heights = [float(element.get("height", "nan")) for element in others]
    # The first two rectangles belong to the legend.
    assert heights[:2] == [12.0, 12.0]
    assert len(heights) == 5
    assert heights[3] == pytest.approx(heights[2] / 2, abs=0.1)
    assert heights[4] == pytest.approx(heights[2] * 0.8, abs=0.1)
    assert "a & b" in [element.text for element in drawn.iter()]
