"""The process that checks grammars: `python -m loramux.platform.grammars.worker MODEL_DIR VOCAB_SIZE EOS...`.

It loads the vocabulary once. Each fork reads one constraint from standard input, confines itself, and answers on
standard output. A grammar that crashes the compiler or takes too long ends only its own fork.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import numpy.random  # noqa: F401 - numpy imports it on first use, when this process can no longer open files

from loramux.adapter_store.sandbox.confinement import ESSENTIAL, REQUIRED, confine, limit_resources
from loramux.adapter_store.sandbox.fork_server import fork_for_each_request
from loramux.engine.constraints.constraint_grammar import GrammarRefused
from loramux.engine.constraints.vocabulary import VocabularyNotUsable, load_vocabulary
from loramux.platform.grammars.check import checked_grammar

STACK_BYTES = 4 << 20
"""Stack size of a check, in bytes. It is smaller than the engine's, so a grammar that passes here cannot overflow
there.
"""


def main() -> int:
    required = ESSENTIAL if REQUIRED in sys.argv else ()
    model_dir, vocab_size, *eos_token_ids = (one for one in sys.argv[1:] if one != REQUIRED)
    try:
        vocabulary = load_vocabulary(Path(model_dir), int(vocab_size), [int(one) for one in eos_token_ids])
    except VocabularyNotUsable as error:
        print(error, file=sys.stderr)
        return 1
    fork_for_each_request(idle_s=None)
    request = json.load(sys.stdin)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit_resources(used_bytes + request["memory_bytes"], request["file_bytes"], request["cpu_s"])
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    confine((), required)
    answer: dict[str, Any]
    try:
        answer = {"grammar": checked_grammar(request["kind"], request["text"], vocabulary)}
    except GrammarRefused as refusal:
        answer = {"refused": refusal.message, "keywords": refusal.keywords, "param": refusal.param}
    json.dump(answer, sys.stdout)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
