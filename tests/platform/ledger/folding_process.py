"""Forks processes that fold rollups until they are killed, one for each input line: `folding_process.py URL`.

It answers with the new process's PID, and with another line once that process has ended. Forking avoids repeated
imports and compilation. A child writes `b` before each fold and `e` after it to the file named on the input line.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from loramux.migrations.database import Database
from loramux.platform.ledger.rollups import UsageRollups


def fold_for_ever(database: Database, rollups: UsageRollups, told: Path) -> None:
    # Connect before the first fold.
    database.check_schema()
    with told.open("wb", buffering=0) as file:
        while True:
            file.write(b"b")
            rollups.fold(1)
            file.write(b"e")


def main(url: str) -> None:
    database = Database(url)
    rollups = UsageRollups(database)
    for line in sys.stdin:
        rollups.fold(1)
        # A connection must not be shared between processes.
        database.close()
        pid = os.fork()
        if pid == 0:
            fold_for_ever(database, rollups, Path(line.strip()))
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
