"""`loramux cluster up` with engines of another command: `python -m tests.cluster.bring_up DOCUMENT`.

DOCUMENT is JSON with the `settings` and the `command` that starts an engine. Ray can join only one cluster per process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loramux.admin.server.data_directory import DataDirectory
from loramux.admin.server.local_cluster import Head, LocalCluster
from loramux.admin.server.settings import LOCAL_CLUSTER, Settings, load_settings
from loramux.admin.serving.cluster_deployment import bring_up

PATHS = ("model", "data_dir")


def started_cluster(
    settings: Mapping[str, Any], command: Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[LocalCluster, Head]:
    """Start a local cluster, with `environment` in addition to this process's, and its replicas. The caller stops it.

    The setting `data_dir` is where its files are.
    """
    document = json.dumps({"settings": dict(settings), "command": list(command)})
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LORAMUX_")}
    paths = os.pathsep.join(path for path in sys.path if path)
    subprocess.run(
        [sys.executable, "-m", "tests.cluster.bring_up", document],
        env={**inherited, "PYTHONPATH": paths, **(environment or {})},
        check=True,
    )
    local = LocalCluster(DataDirectory(Path(settings["data_dir"])).cluster)
    head = local.head()
    assert head is not None
    return local, head


def main(document: str) -> None:
    told = json.loads(document)
    settings = {name: Path(value) if name in PATHS else value for name, value in told["settings"].items()}
    loaded = load_settings(Settings, settings).model_copy(update={"cluster": LOCAL_CLUSTER})
    bring_up(loaded, tuple(told["command"]))


if __name__ == "__main__":
    main(sys.argv[1])
