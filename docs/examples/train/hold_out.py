"""Write the held-out prompts of all tasks, with what is expected, as JSON lines.

python docs/examples/train/hold_out.py admin/demo/real/prompts
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from examples import draw_held_out
from tasks import TASKS

COUNT = 200
SEED = 200

out = Path(sys.argv[1])
for task in TASKS:
    examples = draw_held_out(task, COUNT, SEED)
    lines = [json.dumps({"messages": example.messages, "expected": example.expected}) for example in examples]
    (out / f"{task.name}.jsonl").write_text("\n".join(lines) + "\n")
