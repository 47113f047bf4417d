"""`python -m tests.platform.deploy.debian_packages` installs the Debian packages that the tests of the recipes need."""

from __future__ import annotations

import os
import subprocess
import sys

PACKAGES = ("debootstrap", "golang-github-masterminds-sprig-dev", "nginx-light")


def main() -> None:
    if subprocess.run(["dpkg", "--status", *PACKAGES], capture_output=True, check=False).returncode == 0:
        return
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *PACKAGES]
    if os.geteuid() != 0:
        sys.exit(f"run as root: {' '.join(command)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "--quiet", "update"], env=environment, check=True)
    subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main()
