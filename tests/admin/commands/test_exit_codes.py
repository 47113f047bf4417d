from __future__ import annotations

import errno
import gc
import io
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from loramux.admin import __main__ as program
from loramux.admin import exit_codes
from loramux.admin.commands.output import json_text
from tests.admin.admin_side import ADMIN_KEY

CHECKOUT = Path(__file__).parents[3]
PAGE = CHECKOUT / "docs" / "commands.md"


def test_documented_exit_codes_are_complete() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE.read_text(), re.MULTILINE)}
    assert listed == {
        exit_codes.DONE,
        exit_codes.REFUSED,
        exit_codes.WRONG_CALL,
        exit_codes.UNREACHABLE,
        exit_codes.INTERRUPTED,
    }


def test_ctrl_c_exits_with_130_and_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        variables = {
            "LORAMUX_ADMIN_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "LORAMUX_ADMIN_KEY": ADMIN_KEY,
        }
        verb = subprocess.Popen(
            [sys.executable, "-m", "loramux.admin.cli", "tenants", "list"],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with verb:
            # The command waits for a response that is never sent.
            connection, _ = silent.accept()
            connection.recv(1)
            verb.send_signal(signal.SIGINT)
            printed, said = verb.communicate(timeout=60)
            connection.close()
    assert verb.returncode == 130
    assert printed == ""
    assert said.strip().startswith("loramux: interrupted")
    assert len(said.strip().splitlines()) == 1


def test_ctrl_c_during_the_import_of_the_command_line_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class CtrlC:
        @staticmethod
        def find_spec(name: str, _path: object, _target: object = None) -> None:
            if name == "loramux.admin.cli":
                raise KeyboardInterrupt

    monkeypatch.setattr(sys, "meta_path", [CtrlC, *sys.meta_path])
    monkeypatch.delitem(sys.modules, "loramux.admin.cli", raising=False)
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "\nloramux: interrupted\n")
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"loramux": f"{program.__name__}:main"}


def test_closed_input_and_letters_that_the_encoding_lacks_are_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    monkeypatch.setattr(sys, "stdin", None)

    def command() -> None:
        print("█", sys.stdin.read(), json_text({"a": "ü"}))

    monkeypatch.setattr("loramux.admin.cli.main", command)
    program.main()
    assert output.getvalue() == b'\\u2588  {"a": "\\u00fc"}\n'
    assert os.get_inheritable(sys.stdin.fileno())
    sys.stdin.close()


def test_output_to_a_full_disk_ends_with_one_sentence() -> None:
    command = [sys.executable, "-m", "loramux.admin", "--version"]
    # Otherwise, the output is not written at the end.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=buffered)
    assert (done.returncode, done.stderr) == (1, "loramux: the output cannot be written: No space left on device\n")


def test_a_full_disk_of_another_file_is_not_called_that_of_the_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("loramux.admin.cli.main", command)
    with pytest.raises(SystemExit) as ended:
        program.main()
    said = "loramux: a file or the output cannot be written: No space left on device\n"
    assert (ended.value.code, capsys.readouterr().err) == (1, said)


def test_commands_collect_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only their imports do not."""
    found: list[bool] = []
    monkeypatch.setattr("loramux.admin.cli.main", lambda: found.append(gc.isenabled()))
    program.main()
    assert found == [True]
