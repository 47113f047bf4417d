"""Answer the same question with the base and with each of its adapters, in one batch.

python docs/examples/mixed_adapters.py BASE ADAPTER...
"""

from __future__ import annotations

import sys

from loramux.engine.llm import LLM, SamplingParams

QUESTION = "What is the capital of France?"

base, *directories = sys.argv[1:]
with LLM(base, {directory: directory for directory in directories}) as llm:
    names = [None, *llm.adapters]
    sampling = SamplingParams(temperature=0.0)
    chats = [[{"role": "user", "content": QUESTION}]] * len(names)
    for answer in llm.chat(chats, adapter=names, max_tokens=32, sampling=sampling):
        print(f"{answer.adapter or 'base'}: {answer.text.strip()}")
