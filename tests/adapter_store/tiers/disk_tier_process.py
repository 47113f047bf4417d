"""Runs an engine's disk tier in its own process.

`python disk_tier_process.py DIRECTORY MAX_BYTES` answers each line with one line:

    add DIGEST SIZE    add DIGEST's file, which the tier keeps or drops   -> done
    hold DIGEST        open the file until `close`                        -> size, or none
    close              close the held file                                -> done
    lock               take the directory's lock and never release it     -> done
    begin              leave an unfinished file                           -> done
    churn SEED TURNS   add, read and check files at random                -> number read, number missed
"""

from __future__ import annotations

import os
import random
import sys
from contextlib import ExitStack
from pathlib import Path

from loramux.adapter_store.directory_lock import DirectoryLock
from loramux.adapter_store.tiers.disk_tier import DiskTier, HeldFile

PACK_KEY = "key"


def digest_of(number: int) -> str:
    return f"{number:064x}"


def content(digest: str, size: int) -> bytes:
    return (digest.encode() * (size // len(digest) + 1))[:size]


def put(tier: DiskTier, digest: str, size: int) -> None:
    file = tier.new_file()
    file.write_bytes(content(digest, size))
    try:
        tier.add(digest, file)
    finally:
        file.unlink(missing_ok=True)


def churn(tier: DiskTier, seed: int, num_turns: int) -> str:
    rng = random.Random(seed)
    num_read = num_missed = 0
    for _ in range(num_turns):
        digest = digest_of(rng.randrange(12))
        held = tier.hold(digest)
        if held is None:
            num_missed += 1
            # The files do not all fit, so lookups keep missing.
            put(tier, digest, rng.randint(20_000, 40_000))
            continue
        with held:
            found = os.read(held.descriptor, 1 << 20)
            assert found == content(digest, len(found)), "wrong bytes"
            assert found
            num_read += 1
    return f"{num_read} {num_missed}"


def main() -> None:
    tier = DiskTier(Path(sys.argv[1]), int(sys.argv[2]), PACK_KEY)
    print("ready", flush=True)
    held: HeldFile | None = None
    locks = ExitStack()
    for line in sys.stdin:
        answer = "done"
        match line.split():
            case "add", digest, size:
                put(tier, digest, int(size))
            case "hold", digest:
                held = tier.hold(digest)
                answer = "none" if held is None else str(len(os.read(held.descriptor, 1 << 20)))
            case ("close",):
                assert held is not None
                held.__exit__(None, None, None)
            case ("lock",):
                lock = DirectoryLock(Path(sys.argv[1]) / "lock")
                locks.enter_context(lock.hold())
            case ("begin",):
                tier.new_file().write_bytes(b"half of it")
            case "churn", seed, turns:
                answer = churn(tier, int(seed), int(turns))
        print(answer, flush=True)


if __name__ == "__main__":
    main()
