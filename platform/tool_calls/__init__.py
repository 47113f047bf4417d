"""Tool calls and thinking in generated text: parsers, markers and grammars, without input or output of their own."""
