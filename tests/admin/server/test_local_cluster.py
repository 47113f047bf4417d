from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from loramux.admin.errors import StartRefused
from loramux.admin.server.local_cluster import HEAD_NAME, LOG_NAME, Head, LocalCluster
from loramux.admin.server.settings import ClusterSettings, SettingsError, load_settings
from loramux.admin.serving.cluster_deployment import read_status, take_down
from loramux.platform.cluster.ray_connection import ClusterUnavailable, check_ray, connect


def started(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def test_a_process_with_the_same_identifier_is_not_the_head(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    assert cluster.head() is None
    own = Head(pid=os.getpid(), started=started(os.getpid()), port=5, temp_dir=str(tmp_path / "none"))
    (tmp_path / HEAD_NAME).write_bytes(msgspec.json.encode(own))
    assert cluster.head() == own
    later = msgspec.structs.replace(own, started="1")
    for content in (msgspec.json.encode(later), b"{", b'{"pid": "1"}'):
        (tmp_path / HEAD_NAME).write_bytes(content)
        assert cluster.head() is None
        assert not cluster.stop()


def test_a_cluster_that_does_not_run_is_named_in_one_sentence(tmp_path: Path) -> None:
    settings = load_settings(ClusterSettings, {"data_dir": tmp_path})
    with pytest.raises(StartRefused, match=r"no cluster with the data directory .* runs: start it with") as caught:
        read_status(settings)
    assert "\n" not in str(caught.value)
    assert take_down(settings) == "no cluster was running"
    (tmp_path / "file").touch()
    settings = load_settings(ClusterSettings, {"data_dir": tmp_path / "file"})
    assert take_down(settings) == "no cluster was running"


def test_a_head_that_does_not_answer_is_refused_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loramux.platform.cluster.ray_connection.check_ray", lambda: None)
    with pytest.raises(ClusterUnavailable, match=r"^no cluster answers at 127\.0\.0\.1:1: connection refused$"):
        connect("127.0.0.1:1")


@pytest.mark.parametrize(
    ("cluster", "reason"),
    [
        ("ray://head:10001", "cannot stream"),
        ("head", "is not HOST:PORT"),
        ("head:70000", "is not HOST:PORT"),
        ("", "is not HOST:PORT"),
    ],
)
def test_a_name_of_no_cluster_is_refused(cluster: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        load_settings(ClusterSettings, {"cluster": cluster})


def test_another_version_of_ray_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loramux.platform.cluster.ray_connection.version", lambda name: "2.9.0")
    with pytest.raises(ClusterUnavailable, match=r"needs Ray 2\.60\.0, but Ray 2\.9\.0 is installed"):
        check_ray()


def test_the_files_of_a_cluster_are_private(tmp_path: Path) -> None:
    environment = LocalCluster(tmp_path / "cluster").environment
    assert environment["RAY_AUTH_MODE"] == "token"
    assert Path(environment["RAY_AUTH_TOKEN_PATH"]).is_absolute()
    private = LocalCluster(tmp_path / "private")
    private.prepare()
    token = Path(private.environment["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == 64


def test_a_failed_start_shows_the_end_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "ray"
    script.touch(mode=0o700)
    script.write_text("#!/bin/sh\nfor number in $(seq 100); do echo line $number; done\nexit 1\n")
    monkeypatch.setattr("sys.executable", str(script))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(StartRefused) as caught:
        LocalCluster(tmp_path / "cluster").start(num_gpus=0)
    first, *lines = str(caught.value).splitlines()
    assert first == f"Ray did not start; the end of {tmp_path / 'cluster' / LOG_NAME}:"
    assert lines == [f"line {number}" for number in range(81, 101)]
