"""The three tasks by the names of their adapters."""

from __future__ import annotations

import house_style
import redaction
import tickets
from examples import Task

TASKS = (
    Task("tickets", tickets.draw, num_steps=120),
    Task("redaction", redaction.draw, num_steps=120),
    Task("house-style", house_style.draw, num_steps=100),
)
