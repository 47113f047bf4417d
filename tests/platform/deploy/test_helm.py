"""`make test-container`: the Helm chart's manifests follow Kubernetes' schemas.

Helm itself is not needed: `helm_template.go` renders the templates with Helm's libraries.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from loramux.admin.server.settings import Settings
from loramux.admin.serving.serve import SETTLE_S
from loramux.platform.engine_link.local_engine import Supervision

pytestmark = pytest.mark.campaign

HERE = Path(__file__).parent
CHART = HERE.parents[2] / "platform" / "deploy" / "helm"
TOOLS = HERE.parents[2] / ".venv-deploy" / "bin"
VERSIONS = ("1.27", "1.33")
REQUIRED: dict[str, Any] = {
    "image": {"repository": "registry.example.com/loramux"},
    "model": {"volume": {"persistentVolumeClaim": {"claimName": "base", "readOnly": True}}, "servedName": "base"},
    "database": {"url": "postgresql://loramux@db.internal/loramux"},
    "blobs": {"url": "s3://example-adapters/production"},
    "existingSecret": "loramux",
}
EVERYTHING = {
    **REQUIRED,
    "replicas": 3,
    "shareRequests": True,
    "image": {**REQUIRED["image"], "tag": "cuda", "pullSecrets": ["registry"]},
    "settings": {"max_resident_adapters": 1024, "sandbox": "required"},
    "env": {"AWS_DEFAULT_REGION": "eu-central-1"},
    "resources": {"limits": {"nvidia.com/gpu": 1}},
    "storage": {"className": "fast"},
    "serviceAccount": {"name": "loramux", "annotations": {"eks.amazonaws.com/role-arn": "arn"}},
    "service": {"annotations": {"a": "b"}},
    "ingress": {"enabled": True, "className": "nginx", "host": "llm.example.com", "tlsSecret": "llm"},
    "networkPolicy": {"adminFrom": [{"namespaceSelector": {}}]},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "nodeSelector": {"gpu": "yes"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "podAnnotations": {"a": "b"},
}


def render(values: dict[str, Any], *present: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GO111MODULE": "off", "GOPATH": "/usr/share/gocode"}
    return subprocess.run(
        [TOOLS / "go", "run", HERE / "helm_template.go", CHART, *present],
        input=json.dumps(values),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def manifests(values: dict[str, Any], *present: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Render the chart for a cluster in which objects with the names `present` exist."""
    rendered = render(values, *present)
    assert rendered.returncode == 0, rendered.stderr
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(rendered.stdout) if one}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", [REQUIRED, EVERYTHING], ids=["required", "everything"])
def test_manifests_are_valid(tmp_path: Path, values: dict[str, Any], version: str) -> None:
    check_with_kubernetes(
        [one for (kind, _), one in manifests(values).items() if kind != "ServiceMonitor"], version, tmp_path
    )


def check_with_kubernetes(documents: list[dict[str, Any]], version: str, folder: Path) -> None:
    """Check the documents with the schemas of a version of Kubernetes, in which unknown fields are errors."""
    path = folder / "manifests.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    done = subprocess.run(
        [TOOLS / "kubernetes-validate", "--strict", "-k", version, path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_values_reach_the_server() -> None:
    rendered = manifests(EVERYTHING)
    assert ("PodDisruptionBudget", "loramux") in rendered
    pod = rendered["StatefulSet", "loramux"]["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    environment = {one["name"]: one.get("value") for one in server["env"]}
    assert environment["LORAMUX_MAX_RESIDENT_ADAPTERS"] == "1024"
    assert environment["LORAMUX_DATABASE_URL"] == REQUIRED["database"]["url"]
    assert environment["LORAMUX_PEER_ADDRESS"] == "$(POD_IP):8002"
    assert {"name": "peers", "containerPort": 8002} in server["ports"]
    assert server["securityContext"]["readOnlyRootFilesystem"] is True
    assert server["resources"] == EVERYTHING["resources"]
    assert {mount["name"] for mount in server["volumeMounts"]} == {"data", "model", "tmp"}


def pod_specs(document: Any) -> Iterator[dict[str, Any]]:
    """Yield each pod's `spec` in a rendered document, however deep."""
    if isinstance(document, dict):
        if "containers" in document:
            yield document
        document = list(document.values())
    if isinstance(document, list):
        for one in document:
            yield from pod_specs(one)


@pytest.mark.parametrize(
    ("values", "num_pods"),
    [
        pytest.param(REQUIRED, 2, id="required"),
        pytest.param(EVERYTHING, 2, id="everything"),
        pytest.param({**REQUIRED, "ray": {"enabled": True, "tokenSecret": "ray-token"}}, 4, id="ray"),
        pytest.param({**REQUIRED, "picker": {"enabled": True, "from": [{"podSelector": {}}]}}, 2, id="picker"),
    ],
)
def test_no_pod_gets_variables_of_the_services(values: dict[str, Any], num_pods: int) -> None:
    """The service `loramux` would set LORAMUX_PORT=tcp://... and LORAMUX_SERVICE_HOST, which the server refuses."""
    found = [pod for document in manifests(values).values() for pod in pod_specs(document)]
    assert [pod["enableServiceLinks"] for pod in found] == [False] * num_pods


def test_whole_numbers_and_lists_are_written_as_the_server_reads_them() -> None:
    # As in Helm, the values below are floating-point numbers when they reach the templates.
    settings = {
        "disk_tier_bytes": 214748364800,
        "max_waiting_tokens": 4194304,
        "max_pinned_share": 0.25,
        "run_batches": False,
        "devices": [0, 1],
        "trusted_proxies": ["10.0.0.0/8", "127.0.0.1"],
    }
    values = {**REQUIRED, "settings": settings, "env": {"OMP_STACKSIZE": 16777216}}
    (server,) = manifests(values)["StatefulSet", "loramux"]["spec"]["template"]["spec"]["containers"]
    environment = {one["name"]: one.get("value") for one in server["env"]}
    assert {name: environment[f"LORAMUX_{name.upper()}"] for name in settings} == {
        "disk_tier_bytes": "214748364800",
        "max_waiting_tokens": "4194304",
        "max_pinned_share": "0.25",
        "run_batches": "false",
        "devices": "0,1",
        "trusted_proxies": "10.0.0.0/8,127.0.0.1",
    }
    assert environment["OMP_STACKSIZE"] == "16777216"


def test_a_server_stops_and_starts_as_slowly_as_it_needs() -> None:
    pod = manifests(REQUIRED)["StatefulSet", "loramux"]["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    command, seconds = server["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    drain_s = Settings.model_fields["drain_s"].default
    assert pod["terminationGracePeriodSeconds"] > int(seconds) + drain_s + SETTLE_S
    start_s = server["startupProbe"]["periodSeconds"] * server["startupProbe"]["failureThreshold"]
    assert start_s > Supervision().start_timeout_s
    assert server["livenessProbe"]["httpGet"]["port"] == "admin", "clients can occupy the other listener"


@pytest.mark.parametrize("present", [(), ("loramux",)])
def test_the_upgrade_of_the_schema_has_the_account_if_it_exists(present: tuple[str, ...]) -> None:
    job = manifests(EVERYTHING, *present)["Job", "loramux-database-upgrade"]["spec"]["template"]["spec"]
    assert job.get("serviceAccountName") == next(iter(present), None)
    assert job["automountServiceAccountToken"] is False


def test_prometheus_gives_servers_the_job_that_the_alerts_name() -> None:
    rendered = manifests(EVERYTHING)
    label = rendered["ServiceMonitor", "loramux"]["spec"]["jobLabel"]
    assert rendered["Service", "loramux-admin"]["metadata"]["labels"][label] == "loramux"


def test_the_ingress_passes_on_every_path_of_the_api() -> None:
    (rule,) = manifests(EVERYTHING)["Ingress", "loramux"]["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert (path["path"], path["pathType"]) == ("/", "Prefix")


def test_admin_listener_is_closed_by_default() -> None:
    (rule,) = manifests(REQUIRED)["NetworkPolicy", "loramux"]["spec"]["ingress"]
    assert rule["ports"] == [{"port": "openai"}]


@pytest.mark.parametrize("name", ["image", "model", "database", "blobs", "existingSecret"])
def test_missing_value_is_named(name: str) -> None:
    rendered = render({key: value for key, value in REQUIRED.items() if key != name})
    assert rendered.returncode != 0
    assert f"{name}." in rendered.stderr or f"{name} is required" in rendered.stderr
