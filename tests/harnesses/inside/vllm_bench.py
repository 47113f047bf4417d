"""vLLM's benchmark client without vLLM: its own files, and stand-ins for the modules of vLLM that they import."""

from __future__ import annotations

import argparse
from typing import Any

from absent_modules import allow_absent


def _tokenizer(name: str, **_options: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(name)


allow_absent(
    ("vllm",),
    {
        "vllm.tokenizers": {"get_tokenizer": _tokenizer},
        "vllm.utils.argparse_utils": {"FlexibleArgumentParser": argparse.ArgumentParser},
        "vllm.utils.mistral": {"is_mistral_tokenizer": lambda _tokenizer: False},
        "vllm.utils.gc_utils": {"freeze_gc_heap": lambda: None},
    },
)

from vllm.benchmarks.serve import add_cli_args, main  # noqa: E402

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())
