from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.validation.validation import validate_files
from loramux.adapter_store.validation.validator import SubprocessValidator, ValidationJob
from tests.adapter_store.validation.hostile import MARK, TARGET, Hostile, good_files
from tests.adapter_store.validation.hostile_configs import CONFIGS
from tests.adapter_store.validation.hostile_containers import CONTAINERS, GIANTS, PLACES
from tests.adapter_store.validation.hostile_experts import EXPERTS
from tests.adapter_store.validation.hostile_forms import FORMS
from tests.adapter_store.validation.hostile_trained import TRAINED
from tests.adapter_store.validation.hostile_weights import WEIGHTS

MAX_BYTES = 512 << 20
CATALOGUE = [*CONTAINERS, *CONFIGS, *WEIGHTS, *TRAINED, *EXPERTS, *FORMS]


def test_catalogue_is_long_and_its_names_are_unique() -> None:
    assert len({entry.name for entry in CATALOGUE}) == len(CATALOGUE) >= 150


def test_adapter_that_entries_corrupt_is_valid() -> None:
    files = good_files()
    validate_files(files.config_bytes, files.tensor_bytes, TARGET)
    files = good_files(modules=("model.embed_tokens", "lm_head"))
    validate_files(files.config_bytes, files.tensor_bytes, TARGET)


def assert_no_echo(message: str) -> None:
    """Check that the message is printable ASCII and contains no text or path from the upload."""
    assert 10 < len(message) < 250
    assert message.isascii()
    assert message.isprintable()
    assert MARK not in message.lower()
    assert not re.search(r"/\w|\\|\.\./|Errno", message)


@pytest.mark.parametrize("hostile", CATALOGUE, ids=lambda hostile: hostile.name.replace("/", " "))
def test_hostile_entry_is_refused(hostile: Hostile, tmp_path: Path) -> None:
    config, tensors = hostile.write(tmp_path)
    start = time.process_time()
    with pytest.raises(AdapterRejected) as refused:
        validate_files(config.read_bytes(), tensors, hostile.target)
    assert time.process_time() - start < 10
    assert refused.value.code == hostile.code
    if hostile.param is not None or hostile.code == "zero_effect":
        assert refused.value.param == hostile.param
    assert_no_echo(refused.value.message)


def refuse_in_a_process(hostile: Hostile, directory: Path, validator: SubprocessValidator) -> dict[str, Any]:
    """Check that the real validation process refuses an entry and leaves no files, and return its report."""
    config, tensors = hostile.write(directory)
    job = ValidationJob(config, tensors, directory / "canonical", directory / "packed")
    start = time.monotonic()
    with pytest.raises(AdapterRejected) as refused:
        validator.validate(job, hostile.target)
    assert time.monotonic() - start < 10
    assert refused.value.code == hostile.code
    assert hostile.param is None or refused.value.param == hostile.param
    assert_no_echo(refused.value.message)
    assert not job.canonical.exists()
    assert not job.packed.exists()
    report = dict(refused.value.report)
    assert [check["outcome"] for check in report["checks"]].count("failed") == 1
    return report


SLOW = [hostile for hostile in CONFIGS if hostile.name == "alpha of a slow expression"]


@pytest.mark.parametrize("hostile", [*PLACES, *GIANTS, *SLOW], ids=lambda hostile: hostile.name)
def test_process_refuses_entries_that_depend_on_the_sandbox(
    hostile: Hostile, tmp_path: Path, subprocess_validator: SubprocessValidator
) -> None:
    report = refuse_in_a_process(hostile, tmp_path, subprocess_validator)
    assert report["usage"]["max_address_bytes"] < MAX_BYTES


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_the_process_refuses_the_whole_catalogue(tmp_path: Path, subprocess_validator: SubprocessValidator) -> None:
    reports = {}
    for index, hostile in enumerate(CATALOGUE):
        directory = tmp_path / str(index)
        directory.mkdir()
        reports[hostile.name] = refuse_in_a_process(hostile, directory, subprocess_validator)["usage"]
    by_memory = max(reports, key=lambda name: reports[name]["max_address_bytes"])
    by_rss = max(reports, key=lambda name: reports[name]["max_rss_bytes"])
    by_time = max(reports, key=lambda name: reports[name]["cpu_ms"])
    print(
        f"{len(reports)} refused; most addresses {reports[by_memory]['max_address_bytes'] >> 20} MiB ({by_memory}), "
        f"most memory {reports[by_rss]['max_rss_bytes'] >> 20} MiB ({by_rss}), "
        f"most processor time {reports[by_time]['cpu_ms']} ms ({by_time})"
    )
    assert reports[by_memory]["max_address_bytes"] < MAX_BYTES
    assert reports[by_time]["cpu_ms"] < 10_000
