"""`make test-container`: from plain Debian to an adapter's first answer, by the Dockerfile's steps.

The finished image runs as its own user, on a read-only root, as compose.yaml runs it. The test prints the time of each
part.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.platform.deploy.chroot_image import ROOT, Builder, Image, mounted
from tests.ports import free_port

pytestmark = pytest.mark.campaign

START_S = 120
SECRET = "f" * 40
MODEL = ROOT / "admin" / "demo" / "base"
ADAPTER = ROOT / "admin" / "demo" / "adapters" / "pirate"
SCRIPT = f"""
mount --rbind "$1" "$1" && mount -o remount,bind,ro "$1"
mount --bind "$2" "$1/var/lib/loramux"
mount --bind {MODEL} "$1/models/base" && mount -o remount,bind,ro "$1/models/base"
mount --bind {ADAPTER} "$1/mnt" && mount -o remount,bind,ro "$1/mnt"
mount -t tmpfs tmpfs "$1/tmp"
shift 2
exec "$@"
"""
"""Runs a command in the image `$1` with the volume `$2`, in a separate mount namespace, as compose.yaml does."""


@dataclass(frozen=True)
class Container:
    image: Image
    volume: Path
    environment: dict[str, str]

    def command(self, *words: str) -> list[str]:
        user, group = self.image.user.split(":")
        setpriv = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs"]
        inside = ["chroot", str(self.image.root), *setpriv, "env", "-C", self.image.directory, *words]
        return ["unshare", "--mount", "sh", "-ec", SCRIPT, "sh", str(self.image.root), str(self.volume), *inside]

    def run(self, *words: str) -> str:
        done = subprocess.run(
            self.command(*words), env=self.environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    work = tmp_path_factory.mktemp("container")
    index = {"TORCH_INDEX": os.environ["LORAMUX_TORCH_INDEX"]} if "LORAMUX_TORCH_INDEX" in os.environ else {}
    try:
        with timed("image"):
            built = Builder(work, index).build("cpu")
        yield built
    finally:
        shutil.rmtree(work)


def test_answers_from_a_read_only_image(image: Image, tmp_path: Path) -> None:
    with mounted(image.root, []), running(image, tmp_path) as (container, url, server):
        with timed("start"):
            wait_until_healthy(container, server)
        with timed("first answer of an adapter"):
            container.run("loramux", "tenants", "create", "acme")
            key = container.run("loramux", "keys", "create", "--tenant", "acme", "--name", "first").strip()
            container.run("loramux", "adapters", "push", "/mnt", "--tenant", "acme", "--name", "pirate")
            messages = [{"role": "user", "content": "What is the capital of France?"}]
            answer = httpx.post(
                f"{url}/v1/chat/completions",
                headers={"Authorization": f"Bearer {key}"},
                json={"model": "acme/pirate", "messages": messages},
                timeout=60,
                trust_env=False,
            )
        assert "Paris" in answer.json()["choices"][0]["message"]["content"], answer.text
        assert_uses_compiled_kernels(image, container)


@contextmanager
def running(image: Image, work: Path) -> Iterator[tuple[Container, str, subprocess.Popen[bytes]]]:
    volume = work / "volume"
    volume.mkdir()
    user = int(image.user.split(":")[0])
    os.chown(volume, user, user)
    (image.root / "models" / "base").mkdir(parents=True, exist_ok=True)
    port, admin_port = free_port(), free_port()
    environment = {
        **image.environment,
        "LORAMUX_ADMIN_KEY": SECRET,
        "LORAMUX_METRICS_TOKEN": SECRET,
        "LORAMUX_PORT": str(port),
        "LORAMUX_ADMIN_PORT": str(admin_port),
        "LORAMUX_ADMIN_URL": f"http://127.0.0.1:{admin_port}",
    }
    container = Container(image, volume, environment)
    command = container.command(*image.entrypoint, *image.command)
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        yield container, f"http://127.0.0.1:{port}", server
    finally:
        server.terminate()
        output, _ = server.communicate(timeout=60)
        print(output.decode())


def wait_until_healthy(container: Container, server: subprocess.Popen[bytes]) -> None:
    url = f"{container.environment['LORAMUX_ADMIN_URL']}/health/ready"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended"
        try:
            if httpx.get(url, trust_env=False, timeout=4).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"the server was not ready after {START_S} s")


def assert_uses_compiled_kernels(image: Image, container: Container) -> None:
    (compiled,) = image.root.glob("opt/loramux/lib/python3*/site-packages/loramux/kernels/cpu/__pycache__/numba-*")
    (copied,) = (container.volume / "kernels").iterdir()
    assert copied.name == compiled.name
    assert files_of(copied) == files_of(compiled)


def files_of(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


@contextmanager
def timed(part: str) -> Iterator[None]:
    begin = time.monotonic()
    yield
    print(f"{part}: {time.monotonic() - begin:.0f} s")
