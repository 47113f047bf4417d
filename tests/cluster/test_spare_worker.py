"""The process that Ray keeps in reserve for the next replica: what it imports, and when it is asked for."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from loramux.engine.loop.config import EngineConfig
from loramux.platform.cluster.ray_connection import APP, DEPLOYMENT
from loramux.platform.cluster.spare_worker import PRELOADED

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.cluster,
    # Ray's own modules cause such warnings.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def test_every_module_of_a_process_in_reserve_exists() -> None:
    # Ray only logs it if one does not.
    for name in PRELOADED["RAY_preload_python_modules"].split(","):
        importlib.import_module(name)


@pytest.mark.parametrize(
    ("name", "is_spare"),
    [
        pytest.param("ray::IDLE", True, id="idle"),
        pytest.param("default_worker.py", True, id="starting"),
        pytest.param(f"ray::ServeReplica:{APP}:{DEPLOYMENT}", False, id="replica"),
    ],
)
def test_another_process_is_asked_for_only_if_none_is_idle(name: str, is_spare: bool) -> None:
    # Both processes are children of the shell, as Ray's are of its node manager.
    module = "loramux.platform.cluster.spare_worker"
    asked = f"import ray; from {module} import _has_spare; print(_has_spare())"
    code = f"(exec -a {name} cat) <&3 & \"$0\" -c '{asked}'"
    shell = subprocess.Popen(
        ["bash", "-c", f"exec 3<&0; {code}", sys.executable], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == f"{is_spare}\n"


@pytest.mark.parametrize(("is_on_loopback", "period_s"), [(True, 0.5), (False, 2.0)], ids=["local", "any"])
def test_deaths_are_noticed_sooner_on_one_machine(is_on_loopback: bool, period_s: float) -> None:
    # Ray is installed only where this module runs.
    from loramux.platform.cluster.deployment import ReplicaPlan, replicas

    plan = ReplicaPlan(
        num_replicas=1,
        num_cpus=0,
        num_gpus=0,
        drain_s=1,
        start_timeout_s=1,
        step_timeout_s=1,
        is_on_loopback=is_on_loopback,
    )
    made = replicas(EngineConfig(model_dir="", blob_url="", cache_dir=""), plan)
    assert made._bound_deployment._deployment_config.health_check_period_s == period_s
