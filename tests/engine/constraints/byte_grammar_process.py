"""Follows grammars over the tests' vocabulary, as `loramux.engine.constraints.grammar_process` does over a model's."""

from __future__ import annotations

import sys
from pathlib import Path

from loramux.engine.constraints.grammar_process import serve

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.engine.byte_vocabulary import byte_vocabulary

    serve(byte_vocabulary())
