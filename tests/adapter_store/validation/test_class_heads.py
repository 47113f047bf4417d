"""Adapters for sequence classification, whose head PEFT saves with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.packed.canonical import CanonicalAdapter, write_canonical
from loramux.adapter_store.formats.packed.packed_file import write_packed
from loramux.adapter_store.formats.packed.packing import pack
from loramux.adapter_store.formats.version_files.adapter_task import (
    EMBEDDING_TASK,
    MAX_LABELS,
    AdapterTask,
    classification_task,
    task_problem,
)
from loramux.adapter_store.validation.report import Report
from loramux.adapter_store.validation.validation import validate_files
from tests.adapter_store.adapter_files import AdapterFiles, AdapterMaker
from tests.adapter_store.packed_files import read_packed
from tests.adapter_store.small_base import HIDDEN, OUTER_MODULES, VOCAB_SIZE, make_target

SCORE, CLASSIFIER = "base_model.model.score", "base_model.model.classifier"
TARGET = make_target(outer_modules=OUTER_MODULES)
SAVED = {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}


def head(num_labels: int) -> np.ndarray:
    return np.random.default_rng(num_labels).standard_normal((num_labels, HIDDEN)).astype(np.float32)


def classifier(num_labels: int = 3, name: str = SCORE, **config: Any) -> AdapterFiles:
    files = AdapterMaker(TARGET)(**{**SAVED, **config})
    files.tensors[f"{name}.weight"] = head(num_labels)
    return files


def validate(files: AdapterFiles) -> Report:
    return validate_files(files.config_bytes, files.tensor_bytes, TARGET)


def canonical(files: AdapterFiles, path: Path) -> str:
    report = validate(files)
    return write_canonical(
        files.tensor_bytes,
        report.scales,
        path,
        report.names,
        trained=report.trained,
        vocab_size=report.vocab_size,
        num_labels=report.num_labels,
    )


@pytest.mark.parametrize("name", [SCORE, CLASSIFIER])
@pytest.mark.parametrize("num_labels", [1, 3, VOCAB_SIZE])
def test_a_head_is_packed_as_rows_and_survives_the_packed_file(tmp_path: Path, name: str, num_labels: int) -> None:
    files = classifier(num_labels, name)
    report = validate(files)
    assert report.task == classification_task(num_labels)
    assert report.document()["task"]["labels"][-1] == f"LABEL_{num_labels - 1}"
    assert report.document()["trained_rows"] == {}
    assert "modules_to_save" in report.features
    canonical(files, tmp_path / "canonical")
    packed = pack(tmp_path / "canonical", TARGET)
    assert packed.layout.rows.num_labels == num_labels
    assert packed.layout.rows.counts == (0, num_labels)
    assert packed.num_pages == report.num_pages
    write_packed(tmp_path / "packed", packed, TARGET)
    again = read_packed(tmp_path / "packed", TARGET, packed.digest)
    assert again.layout.rows == packed.layout.rows
    assert np.array_equal(again.payload, packed.payload)
    begin = int(packed.layout.row_offsets[1, 0])
    stream = packed.payload[: packed.layout.num_outer_pages].reshape(-1).view(np.float32)
    assert np.array_equal(stream[begin : begin + HIDDEN], head(num_labels)[0])


def test_a_head_changes_the_digest_and_other_adapters_keep_theirs(tmp_path: Path) -> None:
    plain = AdapterMaker(TARGET)()
    digests = {
        canonical(one, tmp_path / "c") for one in (plain, classifier(2), classifier(3), classifier(2, CLASSIFIER))
    }
    assert len(digests) == 4
    canonical(plain, tmp_path / "c")
    with CanonicalAdapter(tmp_path / "c") as file:
        assert file.num_labels is None


def test_labels_and_the_problem_type_come_from_the_configuration() -> None:
    named = classifier(2, id2label={"1": "yes", "0": "no"}, label2id={"no": 0, "yes": 1})
    named.config["num_labels"] = 2
    assert validate(named).task == AdapterTask("classification", ("no", "yes"), "softmax")
    for problem, activation in (("multi_label_classification", "sigmoid"), ("regression", "identity")):
        task = validate(classifier(1, problem_type=problem)).task
        assert task is not None
        assert task.activation == activation
    task = validate(classifier(1)).task
    assert task is not None
    assert task.activation == "sigmoid"


def test_copies_that_peft_does_not_use_are_ignored() -> None:
    files = classifier(3)
    files.tensors[f"{SCORE}.original_module.weight"] = head(3)
    assert validate(files).task == classification_task(3)


def test_adapters_for_embeddings_are_said_to_be_such() -> None:
    report = validate(AdapterMaker(TARGET)(task_type="FEATURE_EXTRACTION"))
    assert report.task == EMBEDDING_TASK
    assert report.document()["task"] == {"kind": "embedding"}
    assert validate(AdapterMaker(TARGET)()).task is None
    assert validate(AdapterMaker(TARGET)(task_type="SEQ_CLS")).task is None


def changed(num_labels: int = 3, tensors: dict[str, Any] | None = None, **config: Any) -> AdapterFiles:
    files = classifier(num_labels, **config)
    for name, tensor in (tensors or {}).items():
        if tensor is None:
            del files.tensors[name]
        else:
            files.tensors[name] = tensor
    return files


WEIGHT, BIAS = f"{SCORE}.weight", f"{SCORE}.bias"
BAD: dict[str, tuple[AdapterFiles, str, str]] = {
    "no head": (changed(tensors={WEIGHT: None}), "missing_tensor", "modules_to_save"),
    "two heads": (changed(tensors={f"{CLASSIFIER}.weight": head(3)}), "missing_tensor", "modules_to_save"),
    "only a bias": (changed(tensors={WEIGHT: None, BIAS: head(1)[0]}), "unsupported_config", BIAS),
    "a bias": (changed(tensors={BIAS: np.zeros(3, np.float32)}), "unsupported_config", BIAS),
    "only a copy": (
        changed(tensors={WEIGHT: None, f"{SCORE}.original_module.weight": head(3)}),
        "missing_tensor",
        WEIGHT,
    ),
    "another base": (changed(tensors={WEIGHT: np.ones((3, HIDDEN + 1), np.float32)}), "base_mismatch", WEIGHT),
    "no labels": (changed(tensors={WEIGHT: np.ones((0, HIDDEN), np.float32)}), "empty_tensor", WEIGHT),
    "a vector": (changed(tensors={WEIGHT: np.ones(HIDDEN, np.float32)}), "tensor_not_2d", WEIGHT),
    "more labels than tokens": (changed(VOCAB_SIZE + 1), "base_mismatch", WEIGHT),
    "not finite": (changed(tensors={WEIGHT: np.full((3, HIDDEN), np.nan, np.float32)}), "not_finite", WEIGHT),
    "a copy of another shape": (
        changed(tensors={f"{SCORE}.original_module.weight": head(2)}),
        "base_mismatch",
        f"{SCORE}.original_module.weight",
    ),
    "a head for tokens too": (
        changed(
            tensors={"base_model.model.lm_head.weight": np.ones((VOCAB_SIZE, HIDDEN), np.float32)},
            modules_to_save=["score", "lm_head"],
        ),
        "unsupported_config",
        "modules_to_save",
    ),
    "another number of labels": (changed(num_labels=3, id2label={"0": "a", "1": "b"}), "invalid_config", "id2label"),
    "fewer labels": (
        changed(id2label={"0": "a"}),
        "invalid_config",
        "id2label",
    ),
    "labels with a gap": (changed(id2label={"0": "a", "2": "b"}), "invalid_config", "id2label"),
    "labels as a list": (changed(id2label=["a", "b", "c"]), "invalid_config", "id2label"),
    "a label that is a number": (changed(id2label={"0": 1, "1": 2, "2": 3}), "invalid_config", "id2label"),
    "a label with a line break": (changed(id2label={"0": "a\n", "1": "b", "2": "c"}), "invalid_config", "id2label"),
    "an endless label": (changed(id2label={"0": "a" * 129, "1": "b", "2": "c"}), "invalid_config", "id2label"),
    "an unknown problem": (changed(problem_type="ranking"), "invalid_config", "problem_type"),
    "a problem that is a list": (changed(problem_type=["regression"]), "invalid_config", "problem_type"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_head_that_cannot_be_served_is_refused_by_name(case: str) -> None:
    files, code, param = BAD[case]
    with pytest.raises(AdapterRejected) as refused:
        validate(files)
    assert (refused.value.code, refused.value.param) == (code, param), refused.value


def test_a_number_of_labels_must_be_one() -> None:
    for number in (0, -1, 1.5, True, "3", MAX_LABELS + 1):
        files = classifier(3)
        files.config["num_labels"] = number
        with pytest.raises(AdapterRejected) as refused:
            validate(files)
        assert refused.value.param == "num_labels"


def test_tasks_from_the_validation_process_are_not_trusted() -> None:
    for task in (
        AdapterTask("classification"),
        AdapterTask("classification", ("a",) * (MAX_LABELS + 1)),
        AdapterTask("classification", ("",)),
        AdapterTask("classification", ("a\u202eb",)),
        AdapterTask("embedding", ("a",)),
    ):
        assert task_problem(task) is not None
    assert task_problem(classification_task(MAX_LABELS)) is None
    assert task_problem(EMBEDDING_TASK) is None
    assert AdapterTask.from_document(classification_task(2).document()) == classification_task(2)
