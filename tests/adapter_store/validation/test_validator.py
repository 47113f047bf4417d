from __future__ import annotations

import errno
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from safetensors.numpy import save

from loramux.adapter_store.errors import AdapterRejected
from loramux.adapter_store.formats.packed.canonical import digest_of
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.adapter_store.sandbox.confinement import CALLS, ESSENTIAL, FILES
from loramux.adapter_store.sandbox.fork_server import worker_environment
from loramux.adapter_store.validation import worker as validation_worker
from loramux.adapter_store.validation.validator import (
    NICENESS,
    Limits,
    SubprocessValidator,
    ValidationFailed,
    ValidationJob,
    missing_measures,
)
from loramux.kernels.layout import LinearShape, PageGeometry
from tests.adapter_store.adapter_files import AdapterMaker
from tests.adapter_store.packed_files import read_packed
from tests.adapter_store.sandbox import lesser_kernel
from tests.adapter_store.small_base import HIDDEN, OUTER_MODULES, VOCAB_SIZE, make_target
from tests.shared_forks import shared_forks

_opened: list[SubprocessValidator] = []


def opened(**options: Any) -> SubprocessValidator:
    """A validator at normal priority. At its usual lower priority, other tests would delay it on a busy machine."""
    return with_usual_priority(niceness=0, **options)


def with_usual_priority(**options: Any) -> SubprocessValidator:
    _opened.append(SubprocessValidator(**options))
    return _opened[-1]


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


@pytest.fixture
def job(tmp_path: Path, make_adapter: Any) -> ValidationJob:
    files = make_adapter()
    job = ValidationJob(tmp_path / "config", tmp_path / "tensors", tmp_path / "canonical", tmp_path / "packed")
    job.config.write_bytes(files.config_bytes)
    job.tensors.write_bytes(files.tensor_bytes)
    return job


def test_valid_adapter_is_packed(job: ValidationJob, target: PackTarget) -> None:
    accepted = opened().validate(job, target)
    assert accepted.digest == digest_of(job.canonical)
    assert accepted.max_rank == 4
    assert read_packed(job.packed, target, accepted.digest).num_pages == accepted.num_pages
    assert accepted.report["recorded"]["base_model_name_or_path"] == "some/base"


def test_verdict_crosses_the_process_boundary(job: ValidationJob, target: PackTarget) -> None:
    job.config.write_bytes(b'{"peft_type": "LORA", "\\ud800": 1, "\\ud800": 1}')
    with pytest.raises(AdapterRejected) as refused:
        opened().validate(job, target)
    assert (refused.value.code, refused.value.param) == ("duplicate_key", "?")


def test_slow_validation_is_refused(job: ValidationJob, target: PackTarget) -> None:
    with pytest.raises(AdapterRejected) as refused:
        opened(timeout_s=0.01, command=HANGING).validate(job, target)
    assert refused.value.code == "validation_timeout"


def test_excessive_memory_use_is_refused(
    tmp_path: Path, target: PackTarget, adapter_maker: Any, job: ValidationJob
) -> None:
    """An 8 MB adapter for one layer would become half a gigabyte of pages for 64 layers."""
    wide = PackTarget(
        (LinearShape("self_attn.q_proj", 4096, 4096),), replace(target.geometry, num_layers=64), "float32"
    )
    files = adapter_maker(wide)(rank=256, layers=(0,), layers_to_transform=[0], modules=("self_attn.q_proj",))
    job.config.write_bytes(files.config_bytes)
    job.tensors.write_bytes(save({name: tensor / 10 for name, tensor in files.tensors.items()}))
    with pytest.raises(AdapterRejected) as refused:
        opened(memory_bytes=400 << 20).validate(job, wide)
    assert refused.value.code == "validation_killed"


def test_output_above_its_limit_is_a_final_verdict(job: ValidationJob, target: PackTarget) -> None:
    """The largest valid adapter fits within the limit, so a retry would fail too."""
    with pytest.raises(AdapterRejected) as refused:
        opened(file_bytes=10_000).validate(job, target)
    assert refused.value.code == "validation_killed"


@pytest.mark.parametrize(
    ("number", "is_verdict"),
    [
        pytest.param(errno.EFBIG, True, id="file too large"),
        pytest.param(errno.ENOMEM, True, id="no memory"),
        pytest.param(errno.ENOSPC, False, id="disk full"),
        pytest.param(errno.EDQUOT, False, id="quota reached"),
        pytest.param(errno.EIO, False, id="disk broken"),
    ],
)
def test_only_errors_from_the_process_limits_are_verdicts(
    job: ValidationJob, target: PackTarget, monkeypatch: pytest.MonkeyPatch, number: int, is_verdict: bool
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(validation_worker, "write_packed", fail)
    if is_verdict:
        assert validation_worker.answer_to(job, target)["rejected"]["code"] == "validation_killed"
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            validation_worker.answer_to(job, target)


def test_huge_sparse_file_takes_little_memory(job: ValidationJob, target: PackTarget) -> None:
    """The header matches the size of the file, which is a sparse terabyte."""
    shape = (1 << 20, 1 << 18)
    header = json.dumps({"kilroy": {"dtype": "F32", "shape": shape, "data_offsets": [0, 1 << 40]}}).encode()
    with job.tensors.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + (1 << 40))
    with pytest.raises(AdapterRejected) as refused:
        opened().validate(job, target)
    assert (refused.value.code, refused.value.param) == ("unexpected_tensor", "kilroy")
    assert refused.value.report["usage"]["max_address_bytes"] < 256 << 20


def test_refusal_lists_the_checks_that_passed(job: ValidationJob, target: PackTarget) -> None:
    job.tensors.write_bytes(job.tensors.read_bytes()[:-1])
    with pytest.raises(AdapterRejected) as refused:
        opened().validate(job, target)
    outcomes = [check["outcome"] for check in refused.value.report["checks"]]
    assert outcomes == ["passed", "failed", *["not_made"] * 6]


def worker(code: str) -> tuple[str, ...]:
    """The command that starts a validation process whose forks run `code`."""
    begin = "from loramux.adapter_store.sandbox.fork_server import fork_for_each_request\nfork_for_each_request()\n"
    return sys.executable, "-S", "-c", begin + code


HANGING = worker("import time; time.sleep(60)")
RUNNING_THE_CONFIGURATION = worker(
    "import json, sys; job = json.load(sys.stdin)['job']; exec(open(job['config']).read())"
)
"""One process can give all hostile answers."""


def answering(**answer: Any) -> str:
    """Print `answer` with the fields that every answer needs."""
    return f"print({json.dumps({'missing': [], 'usage': {}, **answer})!r})"


VERDICT = {"digest": "x", "max_rank": 1, "num_pages": 1, "report": {}}
HOSTILE_WORKERS = {
    "no answer": "",
    "not JSON": "print('}')",
    "another answer": "print('[]')",
    "no outcome": answering(),
    "two outcomes": answering(accepted=VERDICT, rejected={"code": "x", "message": "x", "param": None, "report": {}}),
    "half an outcome": answering(accepted={"digest": "x", "report": {}}),
    "a number as its code": answering(rejected={"code": 1, "message": "x", "param": None, "report": {}}),
    "an endless answer": "import sys\nfor _ in range(100): sys.stdout.write('[' * 1_000_000)",
    "no output": answering(accepted=VERDICT),
    **{
        f"invocation tokens: {name}": answering(accepted={**VERDICT, "invocation_tokens": tokens})
        for name, tokens in {
            "text": "x",
            "texts": ["x"],
            "negative": [-1],
            "large": [2**21],
            "257": [1] * 257,
        }.items()
    },
    "a link as its output": f"""
import os
open(job['canonical'], 'w').close()
os.symlink('/etc/passwd', job['packed'])
{answering(accepted=VERDICT)}
""",
}


@pytest.mark.parametrize("code", HOSTILE_WORKERS.values(), ids=HOSTILE_WORKERS)
def test_implausible_answer_from_the_process_is_refused(job: ValidationJob, target: PackTarget, code: str) -> None:
    job.config.write_text(code)
    with shared_forks():
        validator = opened(command=RUNNING_THE_CONFIGURATION)
    with pytest.raises(AdapterRejected) as refused:
        validator.validate(job, target)
    assert refused.value.code == "validation_failed"


@pytest.mark.parametrize("way", ["timeout", "close"])
def test_all_processes_of_the_group_are_killed(
    job: ValidationJob, target: PackTarget, tmp_path: Path, way: str
) -> None:
    """If the process can start others on this machine, they are killed with it."""
    note = tmp_path / "pid"
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        f"    open({str(note)!r}, 'w').write(str(os.getpid()) + '.')\n"
        "time.sleep(60)"
    )

    def has_started() -> bool:
        return note.exists() and "." in note.read_text()

    def close(validator: SubprocessValidator) -> None:
        while not has_started():
            time.sleep(0.01)
        validator.close()

    if way == "timeout":
        # On a busy machine, a second is too short for the process to start the other one.
        for timeout_s in (1, 4, 16, 64):
            with pytest.raises(AdapterRejected):
                opened(timeout_s=timeout_s, command=worker(code)).validate(job, target)
            if has_started():
                break
    else:
        validator = opened(timeout_s=30, command=worker(code))
        thread = threading.Thread(target=close, args=(validator,))
        thread.start()
        with pytest.raises(ValidationFailed):
            validator.validate(job, target)
        thread.join()
    stat = Path(f"/proc/{note.read_text().rstrip('.')}/stat")
    for _ in range(6000):
        # The process may not have been reaped yet.
        try:
            if stat.read_text().rpartition(")")[2].split()[0] in "ZX":
                return
        except OSError:
            return
        time.sleep(0.01)
    pytest.fail("a process of the group is still running")


def test_cpu_time_is_limited(job: ValidationJob, target: PackTarget) -> None:
    """The kernel limits the process's CPU time, regardless of the limit on wall time."""
    code = (
        "from loramux.adapter_store.sandbox.confinement import limit_resources\n"
        "limit_resources(1 << 32, 1 << 20, 1)\n"
        "while True: pass"
    )
    with pytest.raises(AdapterRejected) as refused:
        opened(timeout_s=300, command=worker(code)).validate(job, target)
    assert refused.value.code == "validation_killed"


def test_time_limit_is_ten_seconds_or_proportional_to_file_size(target: PackTarget) -> None:
    large = PackTarget((LinearShape("mlp.up_proj", 8192, 32768),), PageGeometry(80, 8, 128, 2, 2), "bfloat16")
    assert Limits.for_upload(target, target.max_tensors_bytes).time_s == 10
    assert Limits.for_upload(large, 1 << 20).time_s == 10
    whole = large.max_tensors_bytes
    assert Limits.for_upload(large, whole).time_s == (whole + large.max_payload_bytes) / (20 << 20)
    for some in (target, large):
        inputs_cap = max(some.max_tensors_bytes, some.max_payload_bytes)
        assert Limits.for_upload(some, 1 << 20).memory_bytes == (512 << 20) + inputs_cap


def test_missing_measures_are_logged_once(job: ValidationJob, target: PackTarget) -> None:
    code = answering(missing=["landlock"], rejected={"code": "x", "message": "x", "param": None, "report": {}})
    validator = opened(command=worker(code))
    with structlog.testing.capture_logs() as entries:
        for _ in range(2):
            with pytest.raises(AdapterRejected):
                validator.validate(job, target)
    assert [(entry["event"], entry["missing"]) for entry in entries] == [
        ("validation_sandbox_incomplete", ["landlock"])
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="sandbox measures require Linux")
@pytest.mark.parametrize("measure", [FILES, CALLS])
def test_missing_required_sandbox_prevents_any_reading(job: ValidationJob, target: PackTarget, measure: str) -> None:
    if CALLS in missing_measures():
        pytest.skip("this machine cannot simulate a lesser kernel")
    worker = ("-m", "loramux.adapter_store.validation.worker")
    command = (sys.executable, lesser_kernel.__file__, measure, *worker)
    with structlog.testing.capture_logs() as entries:
        opened(command=command).validate(job, target)
    assert [entry["missing"] for entry in entries] == [[measure]]
    for path in (job.canonical, job.packed):
        path.unlink()
    with pytest.raises(ValidationFailed, match=f"this machine has no {measure}"):
        opened(command=command, required=ESSENTIAL).validate(job, target)
    assert not job.canonical.exists()


def test_broken_process_gives_no_verdict(job: ValidationJob, target: PackTarget) -> None:
    job.config.unlink()
    with pytest.raises(ValidationFailed, match="No such file"):
        opened().validate(job, target)


def fork_of(validator: SubprocessValidator) -> int:
    """Return the process ID of the validating fork, once the fork leads its own session."""
    while True:
        pid = validator._servers[0].pid
        with suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                if os.getsid(int(child)) == int(child):
                    return int(child)
        time.sleep(0.001)


def test_close_ends_running_validations_without_a_verdict(job: ValidationJob, target: PackTarget) -> None:
    validator = opened(command=HANGING)

    def close() -> None:
        fork_of(validator)
        validator.close()

    thread = threading.Thread(target=close)
    thread.start()
    with pytest.raises(ValidationFailed, match="stopped"):
        validator.validate(job, target)
    thread.join()
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
    """A signal that stops the whole server also reaches its validation process."""
    validator = opened(command=HANGING)

    def end_it() -> None:
        os.kill(fork_of(validator), number)

    thread = threading.Thread(target=end_it)
    thread.start()
    with pytest.raises(error):
        validator.validate(job, target)
    thread.join()


def test_secrets_are_not_accessible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("LORAMUX_ADMIN_KEY", "x")
    assert not any(name.startswith(("AWS", "LORAMUX")) for name in worker_environment())


HEAVY = ("torch", "boto3", "safetensors", "sqlalchemy")
LIGHT_MODULES = {
    "validation.worker": HEAVY,
    "tiers.staging_client": HEAVY,
    "tiers.host_tier": HEAVY,
    "tiers.packed_source": HEAVY,
    "blobs.blob_url": HEAVY,
    "ingest.worker": ("torch", "boto3"),
}
"""The libraries that each module must not import. Modules with more of them come first."""


def test_heavy_libraries_are_not_imported() -> None:
    """One process imports the modules one after another. A library is found at the first module that imports it."""
    code = f"""
import importlib, sys
for module, banned in {LIGHT_MODULES!r}.items():
    importlib.import_module("loramux.adapter_store." + module)
    for library in banned:
        if library in sys.modules:
            print(module, "imports", library)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=worker_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == []


def test_validation_runs_at_low_priority(job: ValidationJob, target: PackTarget) -> None:
    wait = f"import os, time\nwhile os.nice(0) != {NICENESS}: time.sleep(0.01)\n"
    code = wait + answering(missing=[], rejected={"code": "nice", "message": "x", "param": None, "report": {}})
    with pytest.raises(AdapterRejected) as refused:
        with_usual_priority(timeout_s=30, command=worker(code)).validate(job, target)
    assert refused.value.code == "nice"


@pytest.mark.parametrize(
    ("change", "has_base", "is_accepted"),
    [
        pytest.param(0.0, True, True, id="equal"),
        pytest.param(1.0, True, False, id="changed"),
        pytest.param(1.0, False, True, id="changed, without the base"),
    ],
)
def test_copies_in_an_activated_adapter_are_compared_with_the_base(
    job: ValidationJob, tmp_path: Path, change: float, has_base: bool, is_accepted: bool
) -> None:
    target = make_target(outer_modules=OUTER_MODULES)
    files = AdapterMaker(target)(modules=("lm_head", "self_attn.q_proj"), alora_invocation_tokens=[3])
    weights = np.random.default_rng(0).standard_normal((2, VOCAB_SIZE, HIDDEN)).astype(np.float32)
    base = {"model.embed_tokens.weight": weights[0], "lm_head.weight": weights[1]}
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model.safetensors").write_bytes(save(base))
    copy = weights[1].copy()
    copy[-1, -1] += change
    name = "base_model.model.lm_head.base_layer.weight"
    files.tensors[name] = copy
    job.config.write_bytes(files.config_bytes)
    job.tensors.write_bytes(files.tensor_bytes)
    validator = opened(base=BaseWeights(tmp_path / "base" if has_base else tmp_path / "absent"))
    if is_accepted:
        assert validator.validate(job, target).invocation_tokens == (3,)
        return
    with pytest.raises(AdapterRejected) as refused:
        validator.validate(job, target)
    assert (refused.value.code, refused.value.param) == ("base_mismatch", name)
