"""The validation process: the same verdicts, within limits, with nothing of ours in its environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save

from loramux.adapter_store.canonical import digest_of
from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.packed_file import read_packed
from loramux.adapter_store.target import PackTarget
from loramux.adapter_store.validator import SubprocessValidator, ValidationFailed, ValidationJob, worker_environment
from loramux.kernels.layout import LinearShape


@pytest.fixture
def job(tmp_path: Path, make_adapter: Any) -> ValidationJob:
    files = make_adapter()
    job = ValidationJob(tmp_path / "config", tmp_path / "tensors", tmp_path / "canonical", tmp_path / "packed")
    job.config.write_bytes(files.config_bytes)
    job.tensors.write_bytes(files.tensor_bytes)
    return job


def test_a_good_adapter_comes_out_packed(job: ValidationJob, target: PackTarget) -> None:
    accepted = SubprocessValidator().validate(job, target)
    assert accepted.digest == digest_of(job.canonical)
    assert accepted.max_rank == 4
    assert read_packed(job.packed, target, accepted.digest).num_pages == accepted.num_pages
    assert accepted.report["recorded"]["base_model_name_or_path"] == "some/base"


def test_a_verdict_crosses_the_process_border(job: ValidationJob, target: PackTarget) -> None:
    job.config.write_bytes(b'{"peft_type": "LORA", "\\ud800": 1, "\\ud800": 1}')
    with pytest.raises(AdapterRejected) as refused:
        SubprocessValidator().validate(job, target)
    assert (refused.value.code, refused.value.param) == ("duplicate_key", "?")


def test_too_slow_is_refused(job: ValidationJob, target: PackTarget) -> None:
    with pytest.raises(AdapterRejected) as refused:
        SubprocessValidator(timeout_s=0.01).validate(job, target)
    assert refused.value.code == "validation_timeout"


def test_too_much_memory_is_refused(tmp_path: Path, target: PackTarget, adapter_maker: Any, job: ValidationJob) -> None:
    """Eight megabytes in one layer become pages of half a gigabyte in 64 layers."""
    wide = PackTarget(
        (LinearShape("self_attn.q_proj", 4096, 4096),), replace(target.geometry, num_layers=64), "float32"
    )
    files = adapter_maker(wide)(rank=256, layers=(0,), layers_to_transform=[0], modules=("self_attn.q_proj",))
    job.config.write_bytes(files.config_bytes)
    job.tensors.write_bytes(save({name: tensor / 10 for name, tensor in files.tensors.items()}))
    with pytest.raises(AdapterRejected) as refused:
        SubprocessValidator(memory_bytes=400 << 20).validate(job, wide)
    assert refused.value.code == "validation_killed"


def test_a_process_that_cannot_work_says_nothing_about_the_adapter(job: ValidationJob, target: PackTarget) -> None:
    job.config.unlink()
    with pytest.raises(ValidationFailed, match="No such file"):
        SubprocessValidator().validate(job, target)


def test_closing_ends_what_runs_without_a_verdict(job: ValidationJob, target: PackTarget) -> None:
    validator = SubprocessValidator()
    timer = threading.Timer(0.05, validator.close)
    timer.start()
    with pytest.raises(ValidationFailed, match="stopped"):
        validator.validate(job, target)
    timer.join()
    with pytest.raises(ValidationFailed, match="stopped"):
        validator.validate(job, target)


@pytest.mark.parametrize(
    ("number", "error"),
    [
        pytest.param(signal.SIGTERM, ValidationFailed, id="SIGTERM"),
        pytest.param(signal.SIGINT, ValidationFailed, id="SIGINT"),
        pytest.param(signal.SIGHUP, ValidationFailed, id="SIGHUP"),
        pytest.param(signal.SIGKILL, AdapterRejected, id="SIGKILL"),
        pytest.param(signal.SIGXCPU, AdapterRejected, id="SIGXCPU"),
        pytest.param(signal.SIGSEGV, AdapterRejected, id="SIGSEGV"),
    ],
)
def test_only_a_crash_or_a_limit_is_a_verdict(
    job: ValidationJob, target: PackTarget, number: signal.Signals, error: type[Exception]
) -> None:
    """A stop of the whole server signals its validation process as well."""
    validator = SubprocessValidator()

    def end_it() -> None:
        while not validator._running:
            time.sleep(0.001)
        (process,) = validator._running
        os.kill(process.pid, number)

    thread = threading.Thread(target=end_it)
    thread.start()
    with pytest.raises(error):
        validator.validate(job, target)
    thread.join()


def test_no_secret_is_in_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("LORAMUX_ADMIN_KEY", "x")
    assert not any(name.startswith(("AWS", "LORAMUX")) for name in worker_environment())


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("validation_worker", ("torch", "sqlalchemy", "boto3", "safetensors")),
        ("tiers", ("torch", "sqlalchemy", "boto3", "safetensors")),
        ("blob_url", ("torch", "sqlalchemy", "boto3")),
        ("ingest_worker", ("torch", "boto3")),
    ],
)
def test_heavy_libraries_are_not_imported(module: str, banned: tuple[str, ...]) -> None:
    code = f"import sys, loramux.adapter_store.{module}; print(*(name for name in {banned!r} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=worker_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
