from __future__ import annotations

from pathlib import Path


def test_targets_leave_the_option_k_to_the_user() -> None:
    """pytest applies only the last -k, so a user's -k would silently replace the target's and run other tests."""
    recipes = [
        line for line in (Path(__file__).parents[2] / "Makefile").read_text().splitlines() if line.startswith("\t")
    ]
    assert recipes
    assert [line for line in recipes if " -k " in line] == []
