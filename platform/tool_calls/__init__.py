"""Tool calls and thinking in generated text: parsers, markers and grammars. They do no I/O."""
