"""A real S3-compatible server on loopback: Ceph's radosgw with one monitor and one OSD that keeps its data in memory.

`python -m tests.adapter_store.blobs.radosgw` installs Debian's packages if they are missing.

`Radosgw` starts a server in its own directory and stops it. No process or file of the server outlives the test.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import boto3
import httpx

from tests.ports import free_port

PACKAGES = ("radosgw", "ceph-mon", "ceph-osd")
PROGRAMS = ("setpriv", "monmaptool", "ceph", "ceph-mon", "ceph-osd", "radosgw", "radosgw-admin")
ACCESS_KEY, SECRET_KEY = "LORAMUXTEST", "loramux-test-secret"

IS_RADOSGW = os.environ.get("LORAMUX_TEST_S3") == "radosgw"
"""True if the S3 tests use Ceph's radosgw (`make test-s3`) instead of moto."""

_START_S = 120
_CONFIG = """
[global]
fsid = {fsid}
mon_host = 127.0.0.1:{mon_port}
public_addr = 127.0.0.1
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
auth_supported = none
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pgp_num = 1
osd_pool_default_pg_autoscale_mode = off
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 10000
osd_crush_chooseleaf_type = 0
run_dir = {directory}
admin_socket = {directory}/$name.asok
log_file = {directory}/$name.log
pid_file = {directory}/$name.pid
ms_bind_msgr2 = false
ms_bind_msgr1 = true
[mon.a]
host = localhost
mon_data = {directory}/mon
mon_data_avail_warn = 1
mon_data_avail_crit = 0
[osd]
osd_data = {directory}/osd
osd_objectstore = memstore
memstore_device_bytes = 4294967296
osd_class_update_on_start = false
osd_crush_update_on_start = false
osd_class_load_list = *
osd_class_default_list = *
[client.rgw]
rgw_frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw_enable_apis = s3
rgw_thread_pool_size = 32
ms_mon_client_mode = crc
"""


class RadosgwMissing(Exception):
    """The server's programs are missing. The message says how to install them."""


class Radosgw:
    """Accepts `ACCESS_KEY` and `SECRET_KEY` at `url`. Raises RadosgwMissing or RuntimeError."""

    def __init__(self) -> None:
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
        if missing:
            raise RadosgwMissing(_how_to_install(missing))
        # Keep the path short, because the paths of Unix sockets have a maximum length.
        self._directory = Path(tempfile.mkdtemp(prefix="loramux-rgw-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._config = self._directory / "ceph.conf"
        self.url = ""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        for process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(30)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self) -> None:
        port, mon_port = free_port(), free_port()
        fsid = str(uuid.uuid4())
        values = {"fsid": fsid, "mon_port": mon_port, "port": port, "directory": self._directory}
        self._config.write_text(_CONFIG.format(**values))
        (self._directory / "mon").mkdir()
        (self._directory / "osd").mkdir()
        monmap = str(self._directory / "monmap")
        self._run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v1:127.0.0.1:{mon_port}]", monmap)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
        self._spawn("ceph-mon", "-f", "-i", "a")
        osd_uuid = str(uuid.uuid4())
        self._run("ceph", "osd", "new", osd_uuid)
        # The OSD normally adds itself to the CRUSH map, but if it tries before the cluster is ready, it never retries.
        self._run("ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=localhost")
        self._run("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", osd_uuid)
        self._spawn("ceph-osd", "-f", "-i", "0")
        self._spawn("radosgw", "-f", "-n", "client.rgw")
        self.url = f"http://127.0.0.1:{port}"
        self._wait_until_ready()
        self._run(
            *("radosgw-admin", "-n", "client.rgw", "user", "create", "--uid", "tests", "--display-name", "tests"),
            *("--access-key", ACCESS_KEY, "--secret-key", SECRET_KEY),
        )
        self._make_pools()

    def _make_pools(self) -> None:
        """Put an object, so that radosgw creates its pools now. This takes one or two seconds."""
        client = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )
        client.create_bucket(Bucket="first")
        client.put_object(Bucket="first", Key="first", Body=b"1")
        client.close()

    def _run(self, program: str, *arguments: str) -> None:
        command = [program, *([] if program == "monmaptool" else ["-c", str(self._config)]), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_START_S, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed: {done.stderr[-2000:]}")

    def _spawn(self, program: str, *arguments: str) -> None:
        # The daemons die with this process, even if it is killed.
        command = ["setpriv", "--pdeathsig", "KILL", "--", program, "-c", str(self._config), *arguments]
        with (self._directory / f"{program}.out").open("wb") as out:
            self._processes.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT))

    def _wait_until_ready(self) -> None:
        until = time.monotonic() + _START_S
        with httpx.Client(trust_env=False, timeout=2) as client:
            while time.monotonic() < until:
                for process in self._processes:
                    if process.poll() is not None:
                        raise RuntimeError(f"{process.args!r} ended: {self._last_words()}")
                try:
                    client.get(self.url)
                except httpx.TransportError:
                    time.sleep(0.2)
                else:
                    return
        raise RuntimeError(f"radosgw did not start in {_START_S} s: {self._last_words()}")

    def _last_words(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in self._directory.glob("*.out"))


def install() -> None:
    """Install missing packages with apt-get. Raises RadosgwMissing if the installation is not permitted or fails."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise RadosgwMissing(_how_to_install(missing))
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "--yes", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(["apt-get", "--quiet", *arguments], env=environment, timeout=900, check=False)
        if done.returncode != 0:
            raise RadosgwMissing(f"apt-get {arguments[0]} failed; {_how_to_install(missing)}")


def _how_to_install(missing: list[str]) -> str:
    return (
        f"these programs are missing: {', '.join(missing)}; on Debian 12 install them as root with "
        f"`apt-get install --no-install-recommends {' '.join(PACKAGES)}`"
    )


if __name__ == "__main__":
    try:
        install()
    except RadosgwMissing as error:
        sys.exit(str(error))
