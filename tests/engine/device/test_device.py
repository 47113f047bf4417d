from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from loramux.engine.device import backend as backend_module
from loramux.engine.device import cuda_driver
from loramux.engine.device.backend import open_backend
from loramux.engine.device.cuda_driver import count_gpus, missing_for_cuda, missing_for_triton, states_cuda
from loramux.engine.loop import config as config_module
from loramux.engine.loop.config import resolve_device
from loramux.engine.protocol.errors import DeviceNotUsable
from tests.kernels.gpu.interpreted import HAS_GPU

MISSING = "something is missing"


@pytest.mark.parametrize(
    ("requested", "missing", "expected"),
    [
        ("cpu", None, "cpu"),
        ("cpu", MISSING, "cpu"),
        ("auto", None, "cuda"),
        ("auto", MISSING, "cpu"),
        ("cuda", None, "cuda"),
    ],
)
def test_gpu_is_used_if_possible(
    monkeypatch: pytest.MonkeyPatch, requested: str, missing: str | None, expected: str
) -> None:
    monkeypatch.setattr(config_module, "missing_for_cuda", lambda gpus: missing)
    assert resolve_device(requested) == expected


def test_missing_requested_gpu_fails_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "missing_for_cuda", lambda gpus: MISSING)
    with pytest.raises(DeviceNotUsable, match=MISSING):
        resolve_device("cuda")


@pytest.mark.skipif(HAS_GPU, reason="this machine has a GPU")
def test_gpu_backend_without_a_gpu_is_refused_with_a_remedy() -> None:
    with pytest.raises(DeviceNotUsable, match="use --device cpu"):
        open_backend("cuda")


@pytest.mark.parametrize("pdl", [False, True])
def test_overlapping_launches_setting_reaches_the_kernels(monkeypatch: pytest.MonkeyPatch, pdl: bool) -> None:
    asked: list[bool] = []
    accelerator = SimpleNamespace(device=torch.device("cuda", 0))
    monkeypatch.setattr(backend_module, "missing_for_cuda", lambda gpus: None)
    monkeypatch.setattr(backend_module, "missing_for_triton", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend_module, "CudaAccelerator", lambda device: accelerator)
    monkeypatch.setattr(backend_module, "select_kernels", lambda device, pool, shapes, pdl, fuses: asked.append(pdl))
    open_backend("cuda", pdl).make_kernels(cast(Any, None), cast(Any, None))
    assert asked == [pdl]


class Driver:
    """A driver of GPUs with these compute capabilities. Calls listed in `broken` return an error."""

    def __init__(self, *capabilities: tuple[int, int], broken: tuple[str, ...] = ()) -> None:
        self._capabilities = capabilities
        self._broken = broken

    def cuInit(self, flags: int) -> int:
        return self._code("cuInit")

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self._capabilities)
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = 40 + ordinal
        return 0 if ordinal < len(self._capabilities) else 101

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = self._capabilities[device.value - 40][attribute - 75]
        return self._code("cuDeviceGetAttribute")

    def _code(self, call: str) -> int:
        return 999 if call in self._broken else 0


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        pytest.param(Driver((7, 5)), "compute capability 7.5; the kernels need 8.0 or later", id="too old"),
        pytest.param(Driver((8, 0)), None, id="old enough"),
        pytest.param(Driver((12, 0)), None, id="new"),
        pytest.param(Driver((7, 5), broken=("cuDeviceGetAttribute",)), None, id="says nothing"),
        pytest.param(Driver((9, 0), broken=("cuInit",)), "no usable GPU was found", id="lost"),
    ],
)
def test_unsupported_gpu_is_refused_before_startup(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, expected: str | None
) -> None:
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda name: driver)  # type: ignore[attr-defined]
    monkeypatch.setattr(cuda_driver, "torch_has_cuda", lambda: True)
    if expected is None:
        assert resolve_device("auto") == resolve_device("cuda") == "cuda"
        return
    with pytest.raises(DeviceNotUsable, match=f"{expected}.*use .*--device cpu$"):
        resolve_device("cuda")
    assert resolve_device("auto") == "cpu"


@pytest.mark.parametrize(
    ("gpus", "too_old"),
    [((1,), None), ((0,), 0), ((1, 0), 0), ((1, 2), 2), ((1, 9), None)],
    ids=["usable", "first", "both", "last", "absent"],
)
def test_the_gpus_that_engines_use_are_checked(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[int, ...], too_old: int | None
) -> None:
    driver = Driver((7, 5), (9, 0), (6, 1))
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda name: driver)  # type: ignore[attr-defined]
    monkeypatch.setattr(cuda_driver, "torch_has_cuda", lambda: True)
    if too_old is None:
        assert resolve_device("cuda", gpus) == "cuda"
        return
    with pytest.raises(DeviceNotUsable, match=f"^GPU {too_old} has compute capability"):
        resolve_device("cuda", gpus)


@pytest.fixture
def headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of Python's headers, on a machine with a compiler and without other directories of headers."""
    for name in ("CC", "CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "no cache"))
    monkeypatch.setattr(cuda_driver.shutil, "which", lambda name: f"/usr/bin/{name}")  # type: ignore[attr-defined]
    paths = {"include": str(tmp_path)}
    monkeypatch.setattr(cuda_driver.sysconfig, "get_paths", lambda scheme: paths)  # type: ignore[attr-defined]
    return tmp_path


def test_a_gpu_requires_python_s_headers(headers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = missing_for_triton()
    assert missing is not None
    assert f"{headers} has no Python.h: install gcc, libc6-dev and python3." in missing
    monkeypatch.setattr(backend_module, "missing_for_cuda", lambda gpus: None)
    with pytest.raises(DeviceNotUsable, match=r"has no Python\.h"):
        open_backend("cuda")
    monkeypatch.setenv("CPATH", "/elsewhere")
    assert missing_for_triton() is None


def test_a_gpu_requires_a_compiler(headers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (headers / "Python.h").touch()
    assert missing_for_triton() is None
    monkeypatch.setattr(cuda_driver.shutil, "which", lambda name: None)  # type: ignore[attr-defined]
    missing = missing_for_triton()
    assert missing is not None
    assert "needs a C compiler" in missing
    monkeypatch.setenv("CC", "/absent/cc -O2")
    missing = missing_for_triton()
    assert missing is not None
    assert "needs a C compiler" in missing
    built = headers / "cache" / "a1" / "cuda_utils.cpython-311-x86_64-linux-gnu.so"
    built.parent.mkdir(parents=True)
    built.touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(headers / "cache"))
    assert missing_for_triton() is None


def test_gpu_requires_a_torch_built_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "count_gpus", lambda: 1)
    monkeypatch.setattr(cuda_driver, "capability_of", lambda gpu: (9, 0))
    monkeypatch.setattr(cuda_driver, "torch_has_cuda", lambda: False)
    missing = missing_for_cuda()
    assert missing is not None
    assert "constraints-cuda.txt" in missing
    monkeypatch.setattr(cuda_driver, "torch_has_cuda", lambda: True)
    assert missing_for_cuda() is None


def test_missing_driver_means_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "DRIVER", "libno-such-driver.so.1")
    assert count_gpus() == 0


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cuda: Optional[str] = '13.0'", True),
        ('cuda = "12.8"', True),
        ("cuda: Optional[str] = None", False),
        ("cuda = None", False),
        ("debug = False", False),
        ("__all__ = ['__version__', 'debug', 'cuda', 'git_version']", False),
    ],
)
def test_cuda_build_of_torch_is_detected(line: str, expected: bool) -> None:
    assert (
        states_cuda(f"from typing import Optional\n\n__version__ = '2.13.0'\n{line}\nhip: Optional[str] = None\n")
        is expected
    )
