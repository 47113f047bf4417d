"""Runs one evaluation in lm-eval's environment.

It reads a JSON object of arguments from standard input, and writes the metrics and each request's result to a file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

TASKS = Path(__file__).with_name("tasks")


def main() -> None:
    arguments = json.load(sys.stdin)
    found = simple_evaluate(
        model=arguments["model"],
        model_args=arguments["model_args"],
        tasks=arguments["tasks"],
        batch_size=1,
        apply_chat_template=arguments["is_chat"],
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
    )
    metrics = {
        f"{task} {name.partition(',')[0]}": value
        for task, values in found["results"].items()
        for name, value in values.items()
        if isinstance(value, int | float) and "stderr" not in name and name != "sample_len"
    }
    results = {task: [_flat(sample["resps"]) for sample in samples] for task, samples in found["samples"].items()}
    Path(arguments["out"]).write_text(json.dumps({"metrics": metrics, "results": results}))


def _flat(value: Any) -> list[Any]:
    """The log-likelihoods or texts of one document, without the nesting by repeats."""
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in _flat(part)]
    return [value]


if __name__ == "__main__":
    main()
