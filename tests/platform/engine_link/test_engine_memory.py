from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from loramux.platform.engine_link.engine_process import MEMORY_ENVIRONMENT, _environment

STEPS = """
import resource
import numpy as np

def step():
    activations = [np.ones(2 << 20, np.float32) for _ in range(4)]

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(environment: dict[str, str]) -> int:
    ran = subprocess.run([sys.executable, "-c", STEPS], env=environment, capture_output=True, text=True, check=True)
    return int(ran.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only GNU libc has these settings")
def test_freed_memory_is_reused_without_page_faults() -> None:
    environment = _environment()
    assert environment.items() >= MEMORY_ENVIRONMENT.items()
    assert page_faults(environment) < 500
    plain = {name: value for name, value in os.environ.items() if name not in MEMORY_ENVIRONMENT}
    assert page_faults(plain) > 5000, "without the settings there are page faults"


def test_the_engine_does_not_inherit_the_servers_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAMUX_ADMIN_KEY", "secret")
    monkeypatch.setenv("LORAMUX_DATABASE_URL", "postgresql://user:secret@host/name")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "for the staging process")
    assert not any(name.startswith("LORAMUX_") for name in _environment())
    assert _environment()["AWS_SECRET_ACCESS_KEY"] == "for the staging process"


def test_environment_set_by_the_operator_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    assert _environment()["GLIBC_TUNABLES"] == "glibc.malloc.check=0"
    monkeypatch.setenv("TRITON_CACHE_DIR", "/shared/programs")
    assert _environment("/data/programs")["TRITON_CACHE_DIR"] == "/shared/programs"


def test_compiled_kernels_are_cached_in_the_configured_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    assert _environment("/data/programs")["TRITON_CACHE_DIR"] == "/data/programs"
    assert "TRITON_CACHE_DIR" not in _environment()


@pytest.mark.parametrize(("inherited", "visible"), [(None, "1"), ("2,3", "3"), ("GPU-a1, GPU-b2", "GPU-b2")])
def test_an_engine_sees_only_its_own_gpu(monkeypatch: pytest.MonkeyPatch, inherited: str | None, visible: str) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "CUDA_VISIBLE_DEVICES" not in _environment()
    if inherited is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", inherited)
    assert _environment(gpus=(1,))["CUDA_VISIBLE_DEVICES"] == visible
    assert _environment(gpus=(1, 0))["CUDA_VISIBLE_DEVICES"].split(",")[0] == visible
    assert _environment().get("CUDA_VISIBLE_DEVICES") == inherited, "a single engine sees what the server sees"
