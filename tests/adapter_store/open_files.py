from __future__ import annotations

import gc
import os
from contextlib import suppress


def open_files(prefix: str) -> list[str]:
    """The files with this prefix that are open in this process, once for each descriptor.

    Other descriptors are opened and closed meanwhile, by fixtures and by the garbage of earlier tests.
    """
    gc.collect()
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(path for path in found if path.startswith(prefix))
