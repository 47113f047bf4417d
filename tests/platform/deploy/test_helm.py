"""`make test-container`: the Helm chart's manifests follow Kubernetes' schemas.

Helm itself is not needed: `helm_template.go` renders the templates with Helm's libraries.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

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


def render(values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GO111MODULE": "off", "GOPATH": "/usr/share/gocode"}
    return subprocess.run(
        [TOOLS / "go", "run", HERE / "helm_template.go", CHART],
        input=json.dumps(values),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def manifests(values: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    rendered = render(values)
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


def test_admin_listener_is_closed_by_default() -> None:
    (rule,) = manifests(REQUIRED)["NetworkPolicy", "loramux"]["spec"]["ingress"]
    assert rule["ports"] == [{"port": "openai"}]


@pytest.mark.parametrize("name", ["image", "model", "database", "blobs", "existingSecret"])
def test_missing_value_is_named(name: str) -> None:
    rendered = render({key: value for key, value in REQUIRED.items() if key != name})
    assert rendered.returncode != 0
    assert f"{name}." in rendered.stderr or f"{name} is required" in rendered.stderr
