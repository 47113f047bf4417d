"""Answers requests with llama.cpp. Runs in the environment of xllamacpp.

Reads one JSON object per line: prompts as token ids, and how many tokens to generate. Writes the seconds that all
requests took together.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import xllamacpp

MAX_STREAMS, CONTEXT = 16, 512

path, num_threads = sys.argv[1], int(sys.argv[2])
params = xllamacpp.CommonParams()
params.model.path = path
params.n_ctx, params.n_parallel = CONTEXT * MAX_STREAMS, MAX_STREAMS
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
params.n_gpu_layers = params.verbosity = 0
server = xllamacpp.Server(params)


def ask(prompt: list[int], num_tokens: int) -> None:
    answer = server.handle_completions(
        {
            "prompt": prompt,
            "n_predict": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
    )
    answer = answer if isinstance(answer, dict) else json.loads(answer)
    if answer["tokens_predicted"] != num_tokens:
        raise RuntimeError(f"llama.cpp generated {answer['tokens_predicted']} tokens instead of {num_tokens}")


with ThreadPoolExecutor(MAX_STREAMS) as threads:
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        list(threads.map(ask, request["prompts"], [request["num_tokens"]] * len(request["prompts"])))
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)
