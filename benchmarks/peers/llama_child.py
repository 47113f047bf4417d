"""Runs requests with llama.cpp in this process: `python llama_child.py FILE.gguf THREADS SLOTS CONTEXT`.

Needs only xllamacpp, so it can run in an environment of its own. Each line of standard input is a list of prompts and
a number of tokens, as JSON. The answer is a line with the seconds until all requests had all their tokens, and the
seconds of processor time.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import xllamacpp  # type: ignore[import-not-found]


def open_server(path: str, threads: int, slots: int, context: int) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_gpu_layers = 0
    params.n_parallel, params.n_ctx = slots, slots * context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity = 0
    return xllamacpp.Server(params)


def run(server: Any, prompts: list[list[int]], num_tokens: int) -> tuple[float, float]:
    found: list[int] = []

    def ask(prompt: list[int]) -> None:
        settings = {"temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
        answer = server.handle_completions({"prompt": prompt, "n_predict": num_tokens, **settings})
        found.append(answer["usage"]["completion_tokens"])

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    begin, cpu_begin = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    if found != [num_tokens] * len(prompts):
        raise SystemExit(f"llama.cpp generated {found} tokens instead of {num_tokens} for each request")
    return seconds, cpu_seconds


def main() -> None:
    path, *numbers = sys.argv[1:]
    server = open_server(path, *map(int, numbers))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        prompts, num_tokens = json.loads(line)
        print(json.dumps(run(server, prompts, num_tokens)), flush=True)


if __name__ == "__main__":
    main()
