"""A release after this one, for tests of upgrades: its schema has one more step, `later_step/rebuild_rollups.py`."""

from __future__ import annotations

import os
from pathlib import Path

from alembic.config import Config

from loramux.migrations.database import Database

LATER = "later"
"""Revision of the step."""


class LaterDatabase(Database):
    def _alembic_config(self) -> Config:
        config = super()._alembic_config()
        steps = Path(config.get_main_option("script_location") or "", "versions")
        config.set_main_option("path_separator", "os")
        config.set_main_option("version_locations", f"{steps}{os.pathsep}{Path(__file__).parent / 'later_step'}")
        return config
