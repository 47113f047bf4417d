"""Cells of a notebook: keep one engine, stream, and add adapters as you go. Editors show each `# %%` as a cell."""

# %% Load the base once.
import sys

from loramux.engine.llm import LLM, SamplingParams

base, adapter = sys.argv[1:]
llm = LLM(base)
question = [{"role": "user", "content": "What is the capital of France?"}]

# %% Stream an answer of the base.
for piece in llm.stream_chat(question, max_tokens=24, sampling=SamplingParams(temperature=0.0)):
    print(piece.text, end="", flush=True)
print()

# %% Add an adapter that has just been trained, and compare.
llm.add_adapter("trained", adapter)
greedy = SamplingParams(temperature=0.0)
for answer in llm.chat([question] * 2, adapter=[None, "trained"], max_tokens=24, sampling=greedy):
    print(f"{answer.adapter}: {answer.text.strip()}")

# %% Free the memory.
llm.close()
