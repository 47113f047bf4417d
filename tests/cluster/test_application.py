"""What the builder of a cluster's engines refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loramux.admin.errors import StartRefused

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.cluster,
    pytest.mark.usefixtures("no_variables"),
    # Ray's own modules cause such warnings.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        pytest.param({"num_threads": None}, "set num_threads", id="threads"),
        pytest.param({"quantization": "int8"}, "quantise it before", id="quantised"),
        pytest.param({"cluster": "local"}, "remove cluster", id="local"),
        pytest.param({"device": "auto"}, "set device to cpu or cuda", id="device"),
        pytest.param({"blob_url": None}, "set --blob-url", id="no bucket"),
        pytest.param({"replicas": 3}, "replicas", id="unknown"),
    ],
)
def test_settings_that_ray_cannot_use_are_refused(
    demo_base: Path, tmp_path: Path, args: dict[str, Any], said: str
) -> None:
    # Ray is installed only where this module runs.
    from loramux.admin.serving.cluster_application import engines

    given: dict[str, Any] = {
        "model": str(demo_base),
        "data_dir": str(tmp_path),
        "blob_url": "s3://bucket/prefix",
        "device": "cpu",
        "num_threads": 1,
    }
    with pytest.raises(StartRefused, match=said):
        engines(given | args)
