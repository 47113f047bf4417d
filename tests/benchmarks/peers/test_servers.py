from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.peers.child_server import ChildServer, child_server, free_port, server_environment
from benchmarks.peers.http_questions import post_all
from benchmarks.peers.llama_server import (
    LORA_SCRIPT,
    PYTHON_VARIABLE,
    SCRIPTS_VARIABLE,
    SERVER_VARIABLE,
    LlamaFiles,
    base_file,
    convert,
    find_llama,
    llama_command,
    lora_file,
    quantize,
    question_body,
)
from benchmarks.peers.loramux_server import loramux_command
from benchmarks.peers.model_files import ModelFiles
from benchmarks.peers.system import SystemFailed
from benchmarks.peers.vllm_server import VARIABLE, find_vllm, vllm_command, vllm_environment
from benchmarks.peers.workload import BASE, Question
from benchmarks.random_model import SHAPES

ECHO = """
import http.server, json, sys
class Echo(http.server.BaseHTTPRequestHandler):
    def answer(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(200, b"ready")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.answer(body["status"], json.dumps(body).encode())
    def log_message(self, *arguments):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Echo).serve_forever()
"""


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    return ModelFiles(tmp_path, SHAPES["small"], num_adapters=2, rank=16)


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


def flag(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_unset_variable_explains_how_to_set_it(tmp_path: Path) -> None:
    vllm, llama = find_vllm({}, 1, tmp_path), find_llama({}, 1, tmp_path, print)
    assert vllm.missing is not None
    assert VARIABLE in vllm.missing
    assert llama.missing is not None
    assert all(name in llama.missing for name in (SERVER_VARIABLE, SCRIPTS_VARIABLE, PYTHON_VARIABLE))
    assert vllm.systems == llama.systems == ()


def test_variable_with_a_missing_path_reports_the_path(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    found = find_vllm({VARIABLE: str(absent)}, 1, tmp_path)
    assert found.missing is not None
    assert str(absent) in found.missing
    server = script(tmp_path / "llama-server", "")
    llama = find_llama({SERVER_VARIABLE: str(server), SCRIPTS_VARIABLE: str(absent)}, 1, tmp_path, print)
    assert llama.missing is not None
    assert str(absent / LORA_SCRIPT) in llama.missing


def test_environment_without_vllm_reports_the_import_error(tmp_path: Path) -> None:
    python = script(tmp_path / "python", "raise SystemExit('No module named vllm')")
    found = find_vllm({VARIABLE: str(python)}, 1, tmp_path)
    assert found.missing is not None
    assert "(No module named vllm)" in found.missing


def test_found_peers_have_a_version_and_run_in_every_dtype(tmp_path: Path) -> None:
    python = script(tmp_path / "python", "print('noise'); print('version 0.32.0')")
    vllm = find_vllm({VARIABLE: str(python)}, 1, tmp_path)
    assert (vllm.missing, vllm.version) == (None, "0.32.0")
    assert [one.label for one in vllm.systems] == [
        "vLLM, float32",
        "vLLM, bfloat16",
        "vLLM, float32, without LoRA",
        "vLLM, bfloat16, without LoRA",
    ]
    assert vllm.systems[2].kinds == (BASE,)
    server = script(tmp_path / "llama-server", "import sys; print('version: b1 (abc)', file=sys.stderr)")
    for name in ("convert_hf_to_gguf.py", LORA_SCRIPT):
        (tmp_path / name).write_text("")
    llama = find_llama({SERVER_VARIABLE: str(server), SCRIPTS_VARIABLE: str(tmp_path)}, 1, tmp_path, print)
    assert (llama.missing, llama.version) == (None, "b1 (abc)")
    assert [one.dtype for one in llama.systems] == ["float32", "bfloat16", "float16"]
    assert llama.check is not None
    assert llama.check.dtype == "float32"


def test_vllm_command_lists_every_adapter_and_core(files: ModelFiles, tmp_path: Path) -> None:
    command = vllm_command(Path("python"), files, "bfloat16", 8123, has_lora=True)
    assert command[command.index("--lora-modules") + 1 :] == [f"a{i}={files.adapters[f'a{i}']}" for i in range(2)]
    assert (flag(command, "--dtype"), flag(command, "--port"), flag(command, "--max-loras")) == (
        "bfloat16",
        "8123",
        "2",
    )
    plain = vllm_command(Path("python"), files, "bfloat16", 8123, has_lora=False)
    assert plain == command[: len(plain)]
    assert "--enable-lora" in command[len(plain) :]
    python = tmp_path / "bin" / "python"
    assert vllm_environment(python, [0, 3])["VLLM_CPU_OMP_THREADS_BIND"] == "0,3"
    assert "LD_PRELOAD" not in vllm_environment(python, [0])
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    assert vllm_environment(python, [0])["LD_PRELOAD"] == str(library)


def test_llama_server_has_one_slot_per_request_and_checks_in_float32(files: ModelFiles) -> None:
    found = LlamaFiles(Path("llama-server"), Path("scripts"), Path("python"))
    command = llama_command(found, files, "bf16", 2, 8123, is_check=False)
    assert flag(command, "--parallel") == "2"
    assert flag(command, "--ctx-size") == "1024"
    assert flag(command, "--lora").split(",") == [str(lora_file(files, name, "bf16")) for name in ("a0", "a1")]
    assert "--cache-type-k" not in command
    checked = llama_command(found, files, "f32", 2, 8123, is_check=True)
    assert (flag(checked, "--cache-type-k"), flag(checked, "--cache-type-v")) == ("f32", "f32")
    assert flag(checked, "--flash-attn") == "off"


def test_llama_server_combines_a_quantised_base_with_adapters_of_the_outtype(files: ModelFiles) -> None:
    found = LlamaFiles(Path("llama-server"), Path("scripts"), Path("python"))
    command = llama_command(found, files, "bf16", 2, 8123, is_check=False, quantized="Q8_0")
    assert flag(command, "--model") == str(base_file(files, "Q8_0"))
    assert flag(command, "--lora").split(",")[0] == str(lora_file(files, "a0", "bf16"))


def test_quantised_base_is_made_once_by_the_program_beside_the_server(files: ModelFiles, tmp_path: Path) -> None:
    script(tmp_path / "llama-quantize", "import sys; open(sys.argv[2], 'x').write(' '.join(sys.argv[1:]))")
    found = LlamaFiles(tmp_path / "llama-server", Path("scripts"), Path("python"))
    source = base_file(files, "bf16")
    source.parent.mkdir()
    for path in (source, *(lora_file(files, name, "bf16") for name in files.adapters)):
        path.touch()
    for _ in range(2):
        words = quantize(found, files, "Q4_0").read_text().split()
        assert (words[0], words[-1]) == (str(source), "Q4_0")


def test_quantised_llama_needs_its_quantiser(tmp_path: Path) -> None:
    server = script(tmp_path / "llama-server", "")
    for name in ("convert_hf_to_gguf.py", LORA_SCRIPT):
        (tmp_path / name).write_text("")
    variables = {SERVER_VARIABLE: str(server), SCRIPTS_VARIABLE: str(tmp_path)}
    found = find_llama(variables, 1, tmp_path, print, quantized="Q8_0")
    assert found.missing is not None
    assert str(tmp_path / "llama-quantize") in found.missing
    script(tmp_path / "llama-quantize", "")
    assert [one.label for one in find_llama(variables, 1, tmp_path, print, quantized="Q8_0").systems] == [
        "llama-server, Q8_0"
    ]


@pytest.mark.parametrize(
    ("adapter", "lora"), [(None, {"id": 0, "scale": 0.0}), ("a1", {"id": 1, "scale": 1.0})], ids=["base", "adapter"]
)
def test_llama_server_question_enables_only_its_adapter(adapter: str | None, lora: dict[str, float]) -> None:
    body = question_body(Question((7, 8), adapter), 32, {"a0": 0, "a1": 1})
    assert body["lora"] == [lora]
    assert (body["prompt"], body["n_predict"], body["cache_prompt"]) == ([7, 8], 32, False)


def test_failed_conversion_reports_the_error_and_leaves_no_files(files: ModelFiles, tmp_path: Path) -> None:
    for name in ("convert_hf_to_gguf.py", LORA_SCRIPT):
        (tmp_path / name).write_text("raise SystemExit('no sentencepiece')")
    found = LlamaFiles(Path("llama-server"), tmp_path, Path(sys.executable))
    with pytest.raises(SystemFailed, match="no sentencepiece"):
        convert(found, files, "f32")
    assert list((files.directory / "gguf").iterdir()) == []


def test_conversion_creates_each_file_once(files: ModelFiles, tmp_path: Path) -> None:
    writes = "import sys; open(sys.argv[sys.argv.index('--outfile') + 1], 'x').write(' '.join(sys.argv))"
    for name in ("convert_hf_to_gguf.py", LORA_SCRIPT):
        (tmp_path / name).write_text(writes)
    found = LlamaFiles(Path("llama-server"), tmp_path, Path(sys.executable))
    convert(found, files, "f16")
    made = sorted((files.directory / "gguf").iterdir())
    assert [path.name for path in made] == ["a0-f16.gguf", "a1-f16.gguf", "base-f16.gguf"]
    assert made[1].read_text().split()[-1] == str(files.adapters["a1"])
    times = [path.stat().st_mtime_ns for path in made]
    convert(found, files, "f16")
    assert [path.stat().st_mtime_ns for path in made] == times


def test_loramux_runs_with_this_interpreter_on_loopback(files: ModelFiles, tmp_path: Path) -> None:
    command = loramux_command(files, tmp_path, "bfloat16", 8123, 8124)
    assert command[0] == sys.executable
    assert (flag(command, "--host"), flag(command, "--port"), flag(command, "--admin-port")) == (
        "127.0.0.1",
        "8123",
        "8124",
    )
    assert (flag(command, "--dtype"), flag(command, "--speculate")) == ("bfloat16", "off")
    assert "--quantization" not in command
    quantized = loramux_command(files, tmp_path, "bfloat16", 8123, 8124, "int4", "int8")
    assert (flag(quantized, "--quantization"), flag(quantized, "--activations")) == ("int4", "int8")


def test_server_environment_omits_the_variables_that_locate_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "anything")
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    environment = server_environment({"LORAMUX_NUM_THREADS": "2"})
    assert not {VARIABLE, "OMP_NUM_THREADS"} & environment.keys()
    assert (environment["HOME"], environment["LORAMUX_NUM_THREADS"]) == ("/somewhere", "2")


def test_server_becomes_ready_answers_and_stops_with_its_children(tmp_path: Path) -> None:
    port = free_port()
    program = tmp_path / "echo.py"
    program.write_text(ECHO)
    child = tmp_path / "child"
    starts = (
        "import subprocess, sys, pathlib;"
        f"p = subprocess.Popen([sys.executable, {str(program)!r}, '{port}']);"
        f"pathlib.Path({str(child)!r}).write_text(str(p.pid)); p.wait()"
    )
    with child_server("echo", [sys.executable, "-c", starts], os.environ, tmp_path / "logs" / "echo.log") as server:
        server.wait_until_ready(f"http://127.0.0.1:{port}/health", 30.0)
        url = f"http://127.0.0.1:{port}/completion"
        answers, seconds = post_all(url, [{"status": 200, "number": number} for number in range(4)])
        assert [answer["number"] for answer in answers] == [0, 1, 2, 3]
        assert seconds > 0
        with pytest.raises(SystemFailed, match="answers 500"):
            post_all(url, [{"status": 200}, {"status": 500}])
    pid = int(child.read_text())
    # The process has ended, though it may still be a zombie.
    with suppress(FileNotFoundError, ProcessLookupError):
        assert Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z"
    with pytest.raises(SystemFailed, match=r"connection to .* failed"):
        post_all(url, [{"status": 200}])


def test_server_that_exits_early_reports_its_last_output(tmp_path: Path) -> None:
    server = ChildServer(
        "a peer", [sys.executable, "-c", "raise SystemExit('no AVX512 here')"], os.environ, tmp_path / "log"
    )
    with pytest.raises(SystemFailed, match=r"(?s)a peer ended with exit code 1.*no AVX512 here"):
        server.wait_until_ready(f"http://127.0.0.1:{free_port()}/health", 30.0)
    server.stop()


def test_server_that_is_never_ready_times_out(tmp_path: Path) -> None:
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    with (
        child_server("a peer", sleeping, os.environ, tmp_path / "log") as server,
        pytest.raises(SystemFailed, match="not ready after 0 s"),
    ):
        server.wait_until_ready(f"http://127.0.0.1:{free_port()}/health", 0.3)


def test_server_that_ignores_sigterm_is_killed_even_if_the_wait_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_deaf = tmp_path / "is_deaf"
    deaf = (
        "import pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"pathlib.Path({str(is_deaf)!r}).touch(); time.sleep(60)"
    )
    server = ChildServer("a peer", [sys.executable, "-c", deaf], os.environ, tmp_path / "log")
    while not is_deaf.exists():
        server.check()
        time.sleep(0.01)
    process = server._process
    wait = process.wait

    def broken_off(timeout: float | None = None) -> int:
        if timeout is not None:
            raise KeyboardInterrupt
        return wait()

    monkeypatch.setattr(process, "wait", broken_off)
    with pytest.raises(KeyboardInterrupt):
        server.stop()
    assert process.poll() == -signal.SIGKILL
