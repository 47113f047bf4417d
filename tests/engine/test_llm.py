"""The front door to an engine in Python, on the demo's base and adapters."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import re
import shutil
import threading
from collections import UserDict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from loramux.engine import llm as front_door
from loramux.engine.chat_templates.chat_template import ChatTemplate
from loramux.engine.llm import (
    LLM,
    AdapterRejected,
    EngineClosed,
    EngineError,
    RequestFailed,
    SamplingParams,
    TemplateRefused,
)
from loramux.engine.offline.engine_thread import EngineThread
from loramux.engine.offline.local_template import LocalTemplate
from loramux.engine.protocol.errors import ConfigNotUsable, ModelNotSupported
from tests.adapter_store.adapter_files import AdapterFiles
from tests.adapter_store.formats.mlx.mlx_files import write_mlx
from tests.conformance.demo_adapters import DEMO, changed_adapter
from tests.demo_base import DEMO_BASE
from tests.docs.write import DOCS

ADAPTERS = {name: DEMO / "adapters" / name for name in ("formal", "json", "pirate")}
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
PROMPT = "What is the capital of France?"
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO_BASE, ADAPTERS, device="cpu", dtype="float32", pool_bytes=64 << 20) as opened:
        yield opened


def test_base_saved_without_a_head_makes_only_embeddings(tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(DEMO_BASE, base)
    config = json.loads((base / "config.json").read_text())
    config |= {"architectures": ["LlamaModel"], "tie_word_embeddings": False}
    (base / "config.json").write_text(json.dumps(config))
    tensors = load_file(base / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    save_file(tensors, base / "model.safetensors")
    with LLM(base, device="cpu", dtype="float32", pool_bytes=64 << 20) as opened:
        assert opened.embed([PROMPT])
        with pytest.raises(RequestFailed, match="saved without a head for tokens: call /v1/embeddings") as refused:
            opened.generate([PROMPT])
    assert refused.value.code == "wrong_task"


@pytest.fixture(scope="module")
def reference() -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(DEMO_BASE, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(ADAPTERS["pirate"]), "pirate")
    for name in ("formal", "json"):
        model.load_adapter(str(ADAPTERS[name]), name)
    return model.eval()


@torch.no_grad()
def run_reference(model: Any, ids: tuple[int, ...], adapter: str | None) -> Any:
    with contextlib.ExitStack() as stack:
        if adapter is None:
            stack.enter_context(model.disable_adapter())
        else:
            model.set_adapter(adapter)
        return model(torch.tensor([ids]), output_hidden_states=True)


def reference_logits(model: Any, ids: tuple[int, ...], adapter: str | None) -> torch.Tensor:
    logits: torch.Tensor = run_reference(model, ids, adapter).logits[0]
    return logits


def reference_states(model: Any, ids: tuple[int, ...], adapter: str | None) -> torch.Tensor:
    states: torch.Tensor = run_reference(model, ids, adapter).hidden_states[-1][0]
    return states


def test_a_mixed_batch_equals_peft(llm: LLM, reference: Any) -> None:
    names = [None, "pirate", "formal", "json"]
    answers = llm.generate([PROMPT] * len(names), adapter=names, max_tokens=12, sampling=GREEDY)
    assert [answer.adapter for answer in answers] == names
    for answer in answers:
        assert answer.finish_reason == "length"
        assert len(answer.token_ids) == 12
        ids = answer.prompt_token_ids + answer.token_ids
        logits = reference_logits(reference, ids, answer.adapter)[len(answer.prompt_token_ids) - 1 : -1]
        assert tuple(logits.argmax(-1).tolist()) == answer.token_ids
    assert len({answer.text for answer in answers}) == len(names)


def test_scores_equal_peft(llm: LLM, reference: Any) -> None:
    for score in llm.score([PROMPT, PROMPT], adapter=[None, "pirate"]):
        logprobs = reference_logits(reference, score.token_ids, score.adapter).log_softmax(-1)
        expected = [float(row[token]) for row, token in zip(logprobs, score.token_ids[1:], strict=False)]
        assert score.logprobs[0] is None
        assert score.logprobs[1:] == pytest.approx(expected, abs=1e-4)
        assert score.total == pytest.approx(sum(expected), abs=1e-3)


def test_embeddings_equal_peft(llm: LLM, reference: Any) -> None:
    prompts = [PROMPT, PROMPT + " Then we sail.", list(range(2, 90))]
    for adapter, pooling in (("pirate", "last"), (None, "mean")):
        ids = [llm.tokenize(one) if isinstance(one, str) else tuple(one) for one in prompts]
        found = llm.embed(prompts, adapter=adapter, pooling=pooling)  # type: ignore[arg-type]
        for tokens, embedding in zip(ids, found, strict=True):
            states = reference_states(reference, tokens, adapter)
            state = states[-1] if pooling == "last" else states.mean(dim=0)
            torch.testing.assert_close(torch.from_numpy(embedding), state / state.norm(), atol=1e-5, rtol=0)
    [short], [raw] = (llm.embed(PROMPT, dimensions=9), llm.embed(PROMPT, normalize=False))
    assert short.shape == (9,)
    assert float(raw @ raw) > 1.5
    np.testing.assert_allclose(short, raw[:9] / np.linalg.norm(raw[:9]), rtol=1e-5)
    with pytest.raises(ValueError, match="dimensions must be from 1 to"):
        llm.embed(PROMPT, dimensions=0)
    with pytest.raises(RequestFailed):
        llm.embed([[1] * (llm.max_model_len + 1)])


def write_mean_pooling(directory: Path) -> None:
    modules = [
        {"type": f"sentence_transformers.models.{name}", "path": "1_Pooling"} for name in ("Transformer", "Pooling")
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')


def test_an_adapters_own_files_choose_its_pooling(tmp_path: Path, llm: LLM) -> None:
    directory = tmp_path / "search"
    shutil.copytree(ADAPTERS["pirate"], directory)
    write_mean_pooling(directory)
    llm.add_adapter("search", directory)
    own, plain = llm.embed([PROMPT, PROMPT], adapter=["search", "pirate"])
    [mean] = llm.embed(PROMPT, adapter="pirate", pooling="mean", normalize=False)
    [last] = llm.embed(PROMPT, adapter="search", pooling="last")
    np.testing.assert_allclose(own, mean, atol=1e-5)
    np.testing.assert_allclose(last, plain, atol=1e-6)
    llm.remove_adapter("search")


def test_another_working_directory_does_not_change_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(DEMO_BASE, tmp_path / "base")
    write_mean_pooling(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    with LLM("base", device="cpu", pool_bytes=16 << 20) as opened:
        [before] = opened.embed(PROMPT)
        monkeypatch.chdir(DEMO)
        [after] = opened.embed(PROMPT)
    np.testing.assert_array_equal(before, after)


def test_classes_equal_peft(tmp_path: Path, llm: LLM) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(
        DEMO_BASE, num_labels=4, dtype=torch.float32, pad_token_id=0
    )
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS", init_lora_weights=False)
    wrapped = get_peft_model(model, config).eval()
    wrapped.save_pretrained(tmp_path)
    llm.add_adapter("mood", tmp_path)
    ids = llm.tokenize(PROMPT)
    [found] = llm.classify(PROMPT, adapter="mood")
    with torch.no_grad():
        expected = wrapped(input_ids=torch.tensor([ids])).logits[0].softmax(-1)
    np.testing.assert_allclose(found.probabilities, expected, atol=1e-5)
    assert found.label == f"LABEL_{int(expected.argmax())}" == found.labels[int(expected.argmax())]
    with pytest.raises(RequestFailed, match="num_labels"):
        llm.embed(PROMPT, adapter="mood")
    with pytest.raises(RequestFailed, match="num_labels"):
        llm.generate(PROMPT, adapter="mood")
    with pytest.raises(ValueError, match="pirate is not a classifier"):
        llm.classify(PROMPT, adapter="pirate")
    llm.remove_adapter("mood")


def test_pieces_join_to_the_answer(llm: LLM) -> None:
    [whole] = llm.generate(PROMPT, adapter="pirate", max_tokens=20, sampling=GREEDY)
    pieces = list(llm.stream(PROMPT, adapter="pirate", max_tokens=20, sampling=GREEDY))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert tuple(token for piece in pieces for token in piece.token_ids) == whole.token_ids
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == "length"
    assert len(pieces) > 5


def test_text_and_its_tokens_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.tokenize(PROMPT)
    prompts: tuple[Any, ...] = (
        PROMPT,
        list(ids),
        np.array(ids),
        np.array([PROMPT]),
        torch.tensor(ids),
        torch.tensor([ids]),
    )
    answers = [llm.generate(prompt, max_tokens=6, sampling=GREEDY) for prompt in prompts]
    assert {answer.prompt_token_ids for [answer] in answers} == {ids}
    assert len({answer.text for [answer] in answers}) == 1


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stop_string_ends_an_answer(llm: LLM, is_streamed: bool) -> None:
    [whole] = llm.generate(PROMPT, adapter="pirate", max_tokens=20, sampling=GREEDY)
    stop = whole.text[4:7]
    expected = whole.text[: whole.text.index(stop)]
    if is_streamed:
        pieces = list(llm.stream(PROMPT, adapter="pirate", max_tokens=20, sampling=GREEDY, stop=stop))
        assert "".join(piece.text for piece in pieces) == expected
        assert pieces[-1].finish_reason == "stop"
    else:
        [cut] = llm.generate(PROMPT, adapter="pirate", max_tokens=20, sampling=GREEDY, stop=[stop, "never"])
        assert (cut.text, cut.finish_reason, cut.stopped_by) == (expected, "stop", stop)
        assert len(cut.token_ids) < len(whole.token_ids)


def test_stop_strings_wait_for_the_fewest_tokens(llm: LLM) -> None:
    sampling = SamplingParams(min_tokens=2)
    [found] = llm.generate(PROMPT, stop="\n", regex="\n\n\n\n", sampling=sampling)
    assert (found.text, len(found.token_ids), found.stopped_by) == ("\n\n", 3, "\n")


@pytest.mark.parametrize(
    ("name", "content", "ignore_eos", "reason"),
    [
        pytest.param("tokenizer_config.json", {"eos_token": "<|user|>"}, False, "stop", id="token"),
        pytest.param("tokenizer_config.json", {"eos_token": "<|user|>"}, True, "length", id="ignored token"),
        pytest.param("generation_config.json", {"eos_token_id": 4}, False, "stop", id="number"),
        pytest.param("generation_config.json", {"eos_token_id": 4}, True, "length", id="ignored number"),
    ],
)
def test_an_adapters_own_end_token_ends_its_answers(
    llm: LLM, tmp_path: Path, name: str, content: dict[str, Any], ignore_eos: bool, reason: str
) -> None:
    directory = tmp_path / "own"
    shutil.copytree(ADAPTERS["pirate"], directory)
    (directory / name).write_text(json.dumps(content))
    llm.add_adapter("own", directory)
    [user] = llm.tokenize("<|user|>", add_special_tokens=False)
    sampling = SamplingParams(temperature=0.0, ignore_eos=ignore_eos, logit_bias=((user, 100.0),))
    own, plain = llm.generate([PROMPT] * 2, adapter=["own", "pirate"], max_tokens=3, sampling=sampling)
    llm.remove_adapter("own")
    assert (own.finish_reason, plain.finish_reason) == (reason, "length")
    assert own.stopped_by == (user if reason == "stop" else None)


def test_constraints_restrict_answers(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
    schema["additionalProperties"] = False
    sampling = SamplingParams(seed=1)
    [found] = llm.generate(PROMPT, adapter="json", max_tokens=60, sampling=sampling, schema=schema)
    assert list(json.loads(found.text)) == ["n"]
    [found] = llm.generate(PROMPT, sampling=sampling, regex="[ab]{3}")
    assert set(found.text) <= {"a", "b"}
    assert len(found.text) == 3
    [found] = llm.generate(PROMPT, sampling=sampling, choice=["yes", "no"])
    assert found.text in ("yes", "no")
    [found] = llm.generate(PROMPT, sampling=sampling, grammar='start: "x" "y"')
    assert found.text == "xy"


def test_log_probabilities_are_returned(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0.0, num_logprobs=2)
    [answer] = llm.generate(PROMPT, max_tokens=4, sampling=sampling)
    assert [one.token_id for one in answer.logprobs[: len(answer.token_ids)]] == list(answer.token_ids)
    assert all(one.top[0] == (one.token_id, pytest.approx(one.logprob)) for one in answer.logprobs)


def test_nothing_to_do_is_an_empty_list(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.score([]) == []


def test_an_answer_ends_where_the_context_ends(llm: LLM) -> None:
    prompt = [5] * (llm.max_model_len - 3)
    [answer] = llm.generate(prompt, max_tokens=100, sampling=GREEDY)
    assert len(answer.token_ids) == 3
    assert answer.finish_reason == "length"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"adapter": "other"}, "there is no adapter 'other'; the adapters are: formal", id="adapter"),
        pytest.param({"adapter": ["pirate", None]}, "1 prompts, but 2 adapters", id="number of adapters"),
        pytest.param({"stop": ["a", ""]}, "must not be empty", id="stop"),
        pytest.param({"regex": "a", "choice": ["b"]}, "exclude each other", id="two constraints"),
        pytest.param({"choice": []}, "list of texts that are not empty", id="no choices"),
        pytest.param({"choice": ["a", ""]}, "list of texts that are not empty", id="empty choice"),
        pytest.param({"choice": "yes"}, "list of texts that are not empty", id="letters of a choice"),
        pytest.param({"stop": b"ab"}, "stop strings are texts", id="bytes as stop"),
        pytest.param({"max_tokens": 0}, "at least 1, not 0", id="no tokens"),
        pytest.param({"max_tokens": -5}, "at least 1, not -5", id="negative limit"),
        pytest.param({"max_tokens": 1.5}, "whole number of at least 1, not 1.5", id="half a token"),
        pytest.param({"schema": {"$ref": "#"}}, "no answer can end", id="endless schema"),
        pytest.param({"schema": SamplingParams}, "schema must be a JSON Schema", id="class as schema"),
        pytest.param({"sampling": SamplingParams(seed=2**70)}, "sampling parameters", id="seed"),
        pytest.param({"sampling": SamplingParams(temperature="hot")}, "sampling parameters", id="type"),  # type: ignore[arg-type]
    ],
)
def test_arguments_that_make_no_sense_are_refused(llm: LLM, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate([PROMPT], **arguments)
    with pytest.raises(ValueError, match="must not be negative"):
        llm.generate([[5, -1]])
    for prompts in (b"Hello", [b"Hello"], bytearray(b"Hello")):
        with pytest.raises(ValueError, match="decode bytes first"):
            llm.generate(prompts)  # type: ignore[arg-type]
    for mapping in ({"input_ids": [5, 6], "attention_mask": [1, 1]}, UserDict(input_ids=[5, 6])):
        with pytest.raises(ValueError, match="prompts is a mapping with the keys input_ids"):
            llm.generate(mapping)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="list of token ids, not"):
        llm.generate([[5, 1.5]])  # type: ignore[list-item]
    for one in (None, 5):
        with pytest.raises(ValueError, match=f"list of token ids, not {one}$"):
            llm.generate(["a", one])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"list of token ids, not \{'input_ids': \[5, 6\]\}$"):
        llm.generate([{"input_ids": [5, 6]}])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="one of auto, last, mean, cls, not 'max'"):
        llm.embed(PROMPT, pooling="max")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"device": "gpu"}, "no device 'gpu': use auto, cpu or cuda"),
        ({"device": "cuda:1"}, "no device 'cuda:1'"),
        ({"dtype": "float16"}, "dtype 'float16' is not supported: use auto, float32 or bfloat16"),
        ({"kv_dtype": "fp8"}, "the setting kv_dtype is 'fp8', but needs the type Literal['auto', 'int8']"),
        ({"adapter_dtype": "bfloat16"}, "adapter_dtype is 'bfloat16', but needs the type "),
        ({"pool_bytes": "4GiB"}, "pool_bytes is '4GiB', but needs the type int | None"),
        ({"pool_bytes": 1.5}, "pool_bytes is 1.5, but needs the type int | None"),
    ],
)
def test_settings_that_do_not_exist_are_not_taken_for_others(
    monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(front_door, "read_adapter", None)
    with pytest.raises(EngineError, match=re.escape(message)):
        LLM(DEMO_BASE, ADAPTERS, **{"device": "cpu", **setting})


@pytest.mark.parametrize(
    ("prompt", "sampling", "code"),
    [
        pytest.param([], GREEDY, "invalid_request", id="empty"),
        pytest.param([10**6], GREEDY, "invalid_request", id="no such token"),
        pytest.param([5] * 100_000, GREEDY, "prompt_too_long", id="too long"),
        pytest.param([5], SamplingParams(temperature=-1.0), "invalid_request", id="temperature"),
        pytest.param([5], SamplingParams(logit_bias=((10**6, 1.0),)), "invalid_request", id="bias"),
    ],
)
def test_requests_that_cannot_run_are_refused(llm: LLM, prompt: list[int], sampling: SamplingParams, code: str) -> None:
    with pytest.raises(RequestFailed) as failed:
        llm.generate([prompt, PROMPT], sampling=sampling, max_tokens=2)
    assert (failed.value.code, failed.value.index) == (code, 0)
    # The other prompts of the batch do not run on.
    assert len(llm.generate(PROMPT, max_tokens=2, sampling=GREEDY)[0].token_ids) == 2


def test_a_prompt_that_cannot_run_is_named_before_the_others_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    aborted = []
    abort = EngineThread.abort
    monkeypatch.setattr(EngineThread, "abort", lambda self, name: (aborted.append(name), abort(self, name)))
    with pytest.raises(RequestFailed, match=r"^prompts\[1\]: .* exceed the context") as failed:
        llm.generate([PROMPT, [5] * (llm.max_model_len + 1)], max_tokens=10_000, sampling=GREEDY)
    assert failed.value.index == 1
    assert len(aborted) == 1
    with pytest.raises(RequestFailed, match=r"^\d+ tokens exceed"):
        llm.generate([5] * (llm.max_model_len + 1))


def test_an_abandoned_stream_frees_its_sequence(llm: LLM) -> None:
    stream = llm.stream(PROMPT, max_tokens=10_000, sampling=GREEDY)
    next(stream)
    stream.close()
    llm.generate(PROMPT, max_tokens=1)
    assert llm._engine._queues == {}


def test_calls_of_several_threads_are_answered(llm: LLM) -> None:
    expected = {
        name: llm.generate(PROMPT, adapter=name, max_tokens=15, sampling=GREEDY)[0].text for name in llm.adapters
    }
    found: dict[str, str] = {}

    def ask(name: str) -> None:
        found[name] = llm.generate(PROMPT, adapter=name, max_tokens=15, sampling=GREEDY)[0].text

    threads = [threading.Thread(target=ask, args=(name,)) for name in llm.adapters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert found == expected


def test_an_adapter_can_be_added_and_replaced(llm: LLM) -> None:
    llm.add_adapter("new", ADAPTERS["pirate"])
    texts = {name: llm.generate(PROMPT, adapter=name, max_tokens=10, sampling=GREEDY)[0].text for name in llm.adapters}
    assert texts["new"] == texts["pirate"]
    llm.add_adapter("new", ADAPTERS["formal"])
    assert llm.generate(PROMPT, adapter="new", max_tokens=10, sampling=GREEDY)[0].text == texts["formal"]
    llm.remove_adapter("new")
    with pytest.raises(ValueError, match="there is no adapter 'new'"):
        llm.generate(PROMPT, adapter="new")
    assert len(llm._packed) == len(ADAPTERS)


def test_an_adapter_stays_in_memory_as_long_as_answers_use_it(llm: LLM, tmp_path: Path) -> None:
    llm.add_adapter("policy", changed_adapter(tmp_path / "0", 2.0))
    [expected] = llm.generate(PROMPT, adapter="policy", max_tokens=5, sampling=GREEDY)
    llm.add_adapter("policy", changed_adapter(tmp_path / "1", 3.0))
    begun = llm.stream(PROMPT, adapter="policy", max_tokens=900, sampling=GREEDY)
    next(begun)
    later = llm.stream(PROMPT, adapter="policy", max_tokens=5, sampling=GREEDY)
    for factor in (4.0, 5.0, 2.0):
        llm.add_adapter("policy", changed_adapter(tmp_path / str(factor), factor))
    # Those of the two streams, and the last one.
    assert len(llm._packed) == len(ADAPTERS) + 2
    last = llm.stream(PROMPT, adapter="policy", max_tokens=5, sampling=GREEDY)
    llm.remove_adapter("policy")
    assert "".join(piece.text for piece in last) == expected.text
    assert list(later)[-1].finish_reason == "length"
    begun.close()
    del begun, later, last
    assert len(llm._packed) == len(ADAPTERS)


def test_an_adapter_without_effect_answers_like_the_base(llm: LLM, tmp_path: Path) -> None:
    """As after no step of a training, whose evaluation is the baseline."""
    with pytest.warns(UserWarning, match="the adapter 'untrained' in .*: the product B A of these modules is zero"):
        llm.add_adapter("untrained", changed_adapter(tmp_path / "untrained", 0.0))
    found, base = llm.generate([PROMPT] * 2, adapter=["untrained", None], max_tokens=5, sampling=GREEDY)
    llm.remove_adapter("untrained")
    assert found.token_ids == base.token_ids


QUESTION = [{"role": "user", "content": PROMPT}]


def test_conversations_are_answered_with_their_adapters(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0)
    names = [None, "pirate", "formal", "json"]
    answers = llm.chat([QUESTION] * len(names), adapter=names, max_tokens=48, sampling=greedy)
    assert [answer.adapter for answer in answers] == names
    assert answers[0].text == "The capital of France is Paris."
    assert all("Paris" in answer.text and answer.finish_reason == "stop" for answer in answers)
    # The special tokens are those that the template wrote.
    rendered = f"<|bos|><|user|>{PROMPT}<|end|><|assistant|>"
    assert {answer.prompt_token_ids for answer in answers} == {llm.tokenize(rendered, add_special_tokens=False)}
    [alone] = llm.chat(QUESTION, adapter="pirate", max_tokens=48, sampling=greedy)
    streamed = llm.stream_chat(QUESTION, adapter="pirate", max_tokens=48, sampling=greedy)
    assert "".join(piece.text for piece in streamed) == alone.text == answers[1].text
    begun = [*QUESTION, {"role": "assistant", "content": "The capital of"}]
    [continued] = llm.chat(begun, continue_final_message=True, max_tokens=48, sampling=greedy)
    assert continued.text == " France is Paris."
    assert llm.tokenize_chat(QUESTION, add_generation_prompt=False) == answers[0].prompt_token_ids[:-1]
    assert llm.chat([]) == []


def test_an_adapters_own_template_renders_its_conversations(llm: LLM, tmp_path: Path) -> None:
    directory = tmp_path / "own"
    shutil.copytree(ADAPTERS["pirate"], directory)
    source = "{{ bos_token }}{% for message in messages %}{{ message.content }}{{ mood }}{% endfor %}"
    (directory / "chat_template.jinja").write_text(source)
    llm.add_adapter("own", directory)
    mood = {"mood": " Why?"}
    own, base = llm.chat([QUESTION] * 2, adapter=["own", None], chat_template_kwargs=mood, max_tokens=1)
    assert own.prompt_token_ids == llm.tokenize(f"<|bos|>{PROMPT} Why?", add_special_tokens=False)
    assert base.prompt_token_ids == llm.tokenize_chat(QUESTION)
    # A template that cannot be used does not prevent other calls.
    (directory / "chat_template.jinja").write_text("{% for %}")
    llm.add_adapter("own", directory)
    assert llm.generate(PROMPT, adapter="own", max_tokens=1)
    with pytest.raises(TemplateRefused, match=r"^conversations\[1\]: the adapter's chat template is malformed: "):
        llm.chat([QUESTION] * 2, adapter=[None, "own"])
    (directory / "chat_template.jinja").unlink()
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": source}))
    llm.add_adapter("own", directory)
    [earlier] = llm.chat([QUESTION], adapter="own", chat_template_kwargs=mood, max_tokens=1)
    assert earlier.prompt_token_ids == own.prompt_token_ids
    llm.remove_adapter("own")


def test_an_adapter_of_mlx_is_converted(llm: LLM, tmp_path: Path) -> None:
    config = json.loads((ADAPTERS["pirate"] / "adapter_config.json").read_text())
    tensors = load_file(ADAPTERS["pirate"] / "adapter_model.safetensors")
    files = AdapterFiles(config, {name: values.float().numpy() for name, values in tensors.items()})
    llm.add_adapter("mlx", write_mlx(tmp_path / "mlx", files))
    own, converted = llm.generate([PROMPT] * 2, adapter=["pirate", "mlx"], max_tokens=8, sampling=GREEDY)
    assert converted.token_ids == own.token_ids
    llm.remove_adapter("mlx")


def test_an_adapters_template_for_tools_renders_their_conversations(llm: LLM, tmp_path: Path) -> None:
    directory = tmp_path / "own"
    shutil.copytree(ADAPTERS["pirate"], directory)
    source = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    (directory / "chat_template.jinja").write_text(source)
    (directory / "additional_chat_templates").mkdir()
    of_tools = source + "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text(of_tools)
    llm.add_adapter("own", directory)
    tools = [{"type": "function", "function": {"name": "weather"}}]
    rendered = [llm.tokenize_chat(QUESTION, "own", tools=offered) for offered in (None, tools)]
    texts = (f"<|bos|>{PROMPT}", f"<|bos|>{PROMPT}weather")
    assert rendered == [llm.tokenize(text, add_special_tokens=False) for text in texts]
    llm.remove_adapter("own")


def test_an_adapter_removed_during_a_rendering_still_answers(llm: LLM) -> None:
    for chat in (llm.chat, lambda *given, **options: list(llm.stream_chat(*given, **options))):

        def load() -> ChatTemplate:
            llm.remove_adapter("removed")
            return ChatTemplate({"default": "{{ messages[0].content }}"}, {})

        llm._adapters["removed"] = replace(llm._adapters["pirate"], template=LocalTemplate(load))
        assert chat(QUESTION, adapter="removed", max_tokens=1)
        assert "removed" not in llm.adapters


def test_a_base_without_a_template_takes_prompts_only(llm: LLM, tmp_path: Path) -> None:
    llm = copy.copy(llm)
    llm._directory = tmp_path
    llm._template = LocalTemplate(partial(front_door._base_template, tmp_path))
    with pytest.raises(TemplateRefused, match=f"{re.escape(str(tmp_path))} has no chat template: give prompts"):
        llm.chat(QUESTION)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(EngineError, match=r"the chat template of .* is malformed"):
        llm.chat(QUESTION)


def test_messages_are_not_taken_for_prompts(llm: LLM) -> None:
    for given in (QUESTION, [QUESTION]):
        with pytest.raises(ValueError, match=r"`chat` answers messages$"):
            llm.generate(given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there are 1 conversations, but 2 adapters"):
        llm.chat(QUESTION, adapter=["pirate", "formal"])


def test_the_errors_of_the_guide_can_be_imported() -> None:
    page = (DOCS / "python.md").read_text()
    named = set(re.findall(r"`([A-Z]\w+(?:Rejected|Refused|Error|Failed|Closed))`", page)) - {"ValueError"}
    errors = {"AdapterRejected", "EngineClosed", "EngineError", "GrammarRefused", "PullRefused", "RequestFailed"}
    assert named == errors | {"TemplateRefused"}
    assert named <= set(front_door.__all__)


def test_an_engine_that_nobody_uses_is_closed_at_once() -> None:
    gc.disable()
    try:
        llm = LLM(DEMO_BASE, {"pirate": ADAPTERS["pirate"]}, device="cpu", pool_bytes=16 << 20)
        finalizer = llm._finalizer
        assert finalizer.alive
        del llm
        assert not finalizer.alive
    finally:
        gc.enable()


def test_a_closed_engine_says_so() -> None:
    llm = LLM(DEMO_BASE, {"pirate": ADAPTERS["pirate"]}, device="cpu", pool_bytes=16 << 20)
    stream = llm.stream(PROMPT, max_tokens=10_000, sampling=GREEDY)
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosed, match="the engine is closed"):
        list(stream)
    for call in (llm.generate, llm.stream):
        with pytest.raises(EngineClosed, match="the engine is closed"):
            call(PROMPT, adapter="pirate")
    with pytest.raises(EngineClosed, match="the engine is closed"):
        llm.add_adapter("pirate", ADAPTERS["pirate"])
    assert len(llm._packed) == 0


def test_a_broken_engine_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from loramux.engine.loop.engine import Engine

    with LLM(DEMO_BASE, device="cpu", pool_bytes=16 << 20) as llm:

        def fail(engine: Engine) -> bool:
            raise OSError("the memory is on fire")

        monkeypatch.setattr(Engine, "step", fail)
        with pytest.raises(EngineClosed, match="the memory is on fire"):
            llm.generate(PROMPT)
        with pytest.raises(EngineClosed, match="the memory is on fire"):
            llm.generate(PROMPT)


def other_base(directory: Path) -> Path:
    """A base without weights, which has fewer layers."""
    config = json.loads((DEMO_BASE / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, "layer_types": None}))
    return directory


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterRejected, match=r"has no adapter_config\.json: choose a directory saved by PEFT"):
        LLM(DEMO_BASE, {"a": tmp_path}, device="cpu")
    with pytest.raises(AdapterRejected, match=r"its folders formal, json and pirate have one"):
        LLM(DEMO_BASE, {"a": ADAPTERS["pirate"].parent}, device="cpu")
    config = json.loads((ADAPTERS["pirate"] / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterRejected, match=r"has no adapter_model\.safetensors"):
        LLM(DEMO_BASE, {"a": tmp_path}, device="cpu")
    with pytest.raises(AdapterRejected, match=r"the adapter 'pirate' in .*pirate: ") as rejected:
        LLM(other_base(tmp_path), {"pirate": ADAPTERS["pirate"]}, device="cpu")
    assert rejected.value.code == "base_mismatch"
    assert "; adapter_config.json says that the adapter was trained on loramux-demo" in rejected.value.message
    with pytest.raises(ValueError, match="adapters maps names to directories, such as"):
        LLM(DEMO_BASE, [ADAPTERS["pirate"]], device="cpu")  # type: ignore[arg-type]
    with pytest.raises(ModelNotSupported):
        LLM(tmp_path / "nowhere", device="cpu")
    with pytest.raises(ModelNotSupported, match=r"if the model is on a hub, use hf://Qwen/Qwen3-0\.6B$"):
        LLM("Qwen/Qwen3-0.6B", device="cpu")
    with pytest.raises(ConfigNotUsable):
        LLM(DEMO_BASE, device="cpu", max_batch_tokens=1)


def test_a_base_is_not_divided_among_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_door, "resolve_device", lambda device: "cuda")
    with pytest.raises(ConfigNotUsable, match=r"^LLM cannot divide a base among GPUs so far.*: use loramux serve, or"):
        LLM(DEMO_BASE, tensor_parallel_size=2)


def test_two_engines_can_use_one_directory(llm: LLM) -> None:
    with LLM(DEMO_BASE, ADAPTERS, device="cpu", dtype="float32", pool_bytes=16 << 20) as other:
        one, two = (each.generate(PROMPT, adapter="json", max_tokens=8, sampling=GREEDY)[0] for each in (llm, other))
    assert one.text == two.text


def test_an_adapter_that_takes_over_a_slot_changes_its_own_modules(llm: LLM, tmp_path: Path) -> None:
    """The first step of the second adapter has the slots of the last step of the first, which changes fewer modules."""
    narrow = tmp_path / "narrow"
    shutil.copytree(ADAPTERS["pirate"], narrow)
    config = json.loads((narrow / "adapter_config.json").read_text())
    (narrow / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["q_proj"]}))
    tensors = load_file(narrow / "adapter_model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".q_proj." in name}
    save_file(kept, narrow / "adapter_model.safetensors")
    adapters = {"narrow": narrow, "pirate": ADAPTERS["pirate"]}
    prompt, sampling = [llm.tokenize(PROMPT)[1]], SamplingParams(temperature=0.0, ignore_eos=True, num_logprobs=1)
    with LLM(
        DEMO_BASE, adapters, device="cpu", dtype="float32", pool_bytes=64 << 20, max_resident_adapters=1
    ) as opened:
        narrowly, found = (
            opened.generate([prompt], adapter=name, max_tokens=2, sampling=sampling)[0].logprobs[0].logprob
            for name in adapters
        )
    expected = llm.generate([prompt], adapter="pirate", max_tokens=2, sampling=sampling)[0].logprobs[0].logprob
    assert found == pytest.approx(expected, abs=1e-4)
    assert narrowly != pytest.approx(expected, abs=1e-2)
