"""The rule of `make test-fast`, on a file of small tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.fast import FOLDERS

ROOT = Path(__file__).parents[2]
TESTS = """
import asyncio, os, subprocess, threading
from contextlib import suppress

import pytest

def start():
    subprocess.run(["touch", "started"], check=True)

@pytest.fixture(scope="session")
def postgres_server():
    start()

@pytest.fixture(params=["sqlite", "postgres"])
def database(request):
    if request.param == "postgres":
        request.getfixturevalue("postgres_server")

@pytest.fixture(scope="module")
def engine_process():
    start()

def test_quiet(): pass
def test_fails(): raise ValueError
def test_either_database(database): pass
def test_server(postgres_server): pass
def test_starts(): start()
def test_hides_it():
    with suppress(Exception):
        start()
def test_in_a_thread():
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
def test_in_a_loop():
    asyncio.run(asyncio.create_subprocess_exec("touch", "started"))
def test_forks():
    if os.fork() == 0:
        os._exit(0)
def test_in_a_fixture(engine_process): pass
def test_in_the_same_fixture(engine_process): pass
"""


def test_tests_that_start_a_process_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "test_small.py"
    file.write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        os.devnull,
        "-p",
        "tests.fast",
        "-p",
        "no:cacheprovider",
        "-rA",
        file,
    ]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**inherited, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    outcomes = {
        words[1].partition("::")[2]: words[0]
        for line in done.stdout.splitlines()
        if (words := line.split()) and words[0] in ("PASSED", "FAILED", "ERROR")
    }
    assert outcomes == {"test_quiet": "PASSED", "test_either_database[sqlite]": "PASSED", "test_fails": "FAILED"}
    assert "1 failed, 2 passed, 7 skipped, 2 deselected" in done.stdout, done.stdout
    assert done.stdout.count("it starts a process") >= 1
    assert not (tmp_path / "started").exists()


def test_folders_exist() -> None:
    assert [folder for folder in FOLDERS if not (ROOT / folder).is_dir()] == []
