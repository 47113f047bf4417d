"""Follows grammars over the tests' vocabulary, as `loramux.engine.constraints.grammar_process` does over a model's."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from loramux.adapter_store.sandbox.confinement import ESSENTIAL, REQUIRED
from loramux.engine.constraints.grammar_process import serve

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.engine.byte_vocabulary import byte_vocabulary

    # The number of forced tokens must not depend on the machine's speed.
    serve(byte_vocabulary(), ahead_cpu_s=math.inf, required=ESSENTIAL if REQUIRED in sys.argv else ())
