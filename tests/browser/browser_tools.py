"""The browser tests' tools outside Python: Chromium from Debian and axe-core from the npm registry.

`python -m tests.browser.browser_tools` installs Chromium if run as root, and downloads axe-core.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
AXE = "axe-core@4.14.1"
AXE_SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
AXE_FILE = Path(sys.prefix) / "share" / "axe-core" / "axe.min.js"
"""Path of axe-core. It is stored in the test environment, because it is not part of the product."""


def chromium_path() -> str:
    """The path of the browser. LORAMUX_CHROMIUM overrides it."""
    named = os.environ.get("LORAMUX_CHROMIUM")
    found = named or next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if found is None:
        raise RuntimeError("Chromium is not installed: apt-get install chromium, or set LORAMUX_CHROMIUM")
    return found


def axe_source() -> str:
    content = AXE_FILE.read_bytes()
    if hashlib.sha256(content).hexdigest() != AXE_SHA256:
        raise RuntimeError(f"{AXE_FILE} is not {AXE}; remove it and run make test-browser again")
    return content.decode()


def install() -> None:
    try:
        chromium_path()
    except RuntimeError:
        if os.geteuid() != 0:
            raise
        subprocess.run(["apt-get", "install", "-y", "--no-install-recommends", "chromium"], check=True)
    if not AXE_FILE.is_file():
        with tempfile.TemporaryDirectory() as directory:
            subprocess.run(["npm", "pack", "--silent", AXE], cwd=directory, check=True)
            with tarfile.open(next(Path(directory).glob("*.tgz"))) as package:
                member = package.extractfile("package/axe.min.js")
                assert member is not None
                AXE_FILE.parent.mkdir(parents=True, exist_ok=True)
                AXE_FILE.write_bytes(member.read())
    axe_source()


if __name__ == "__main__":
    install()
