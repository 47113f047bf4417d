"""A process that folds rollups until it is killed: `folding_process.py URL`; for each line that it reads, another one.

It answers with the new process's number, forked so that nothing has to be imported or compiled again, and with one
more line once that has ended. A process that folds writes `b` before each fold and `e` after it to the file that the
line names.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from loramux.migrations.database import Database
from loramux.platform.ledger.rollups import UsageRollups


def fold_for_ever(database: Database, rollups: UsageRollups, told: Path) -> None:
    # The connection is there before the first fold.
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
        # A connection is one process's.
        database.close()
        pid = os.fork()
        if pid == 0:
            fold_for_ever(database, rollups, Path(line.strip()))
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
