"""`make test-container`: what the recipes for Ray and for endpoint pickers create follows the schemas of its resources.

LORAMUX_CRDS=DIR names a directory with the original definitions of KubeRay and of the Gateway API's inference
extension. With it, the manifests are checked against these, too.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from jsonschema import Draft202012Validator

from loramux.admin.server.settings import Settings
from loramux.platform.cluster.ray_connection import APP, RAY_VERSION
from tests.platform.deploy.resource_schemas import (
    ENDPOINT_PICKER_CONFIG,
    INFERENCE_POOL,
    LLM_D_VALUES,
    RAY_SERVICE,
    original,
)
from tests.platform.deploy.test_helm import HERE, REQUIRED, TOOLS, check_with_kubernetes, manifests, render
from tests.ports import free_port

pytestmark = pytest.mark.campaign

ROOT = HERE.parents[2]
RECIPES = ROOT / "platform" / "deploy" / "gateway-api"
CRDS = os.environ.get("LORAMUX_CRDS")
SELECTOR = {"app.kubernetes.io/name": "loramux", "app.kubernetes.io/instance": "loramux"}
RAY: dict[str, Any] = {**REQUIRED, "ray": {"enabled": True, "tokenSecret": "ray-token"}}
SCALED_RAY: dict[str, Any] = {
    **RAY,
    "settings": {"max_resident_adapters": 1024, "sandbox": "required", "pool_bytes": 68719476736},
    "env": {"AWS_DEFAULT_REGION": "eu-central-1"},
    "nodeSelector": {"pool": "llm"},
    "ray": {
        **RAY["ray"],
        "engines": 2,
        "maxEngines": 8,
        "engineResources": {"limits": {"cpu": 4, "memory": "64Gi", "nvidia.com/gpu": 1}},
        "redis": {"address": "redis.example.com:6379", "passwordSecret": "redis"},
    },
}
PICKED: dict[str, Any] = {
    **REQUIRED,
    "picker": {"enabled": True, "from": [{"podSelector": {"matchLabels": {"app": "picker"}}}]},
}


def check(document: Any, schema: dict[str, Any]) -> None:
    assert [f"{one.json_path}: {one.message}" for one in Draft202012Validator(schema).iter_errors(document)] == []


def ray_service(values: dict[str, Any]) -> dict[str, Any]:
    return manifests(values)["RayService", "loramux"]["spec"]


def pods(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods of Ray's head and of an engine."""
    cluster = ray_service(values)["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    return [cluster["headGroupSpec"]["template"], group["template"]]


def pool_and_route() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((RECIPES / "inference-pool.yaml").read_text()))


@pytest.mark.parametrize("values", [RAY, SCALED_RAY], ids=["few values", "all values"])
def test_ray_service_follows_the_documented_schema(tmp_path: Path, values: dict[str, Any]) -> None:
    rendered = manifests(values)
    check(rendered["RayService", "loramux"], RAY_SERVICE)
    templates = [{"apiVersion": "v1", "kind": "Pod", **one} for one in pods(values)]
    for number, pod in enumerate(templates):
        pod["metadata"]["name"] = f"pod-{number}"
    others = [one for (kind, _), one in rendered.items() if kind != "RayService"]
    check_with_kubernetes([*templates, *others], "1.33", tmp_path)


@pytest.mark.skipif(CRDS is None, reason="LORAMUX_CRDS names no directory")
def test_resources_follow_the_original_definitions() -> None:
    assert CRDS is not None
    schema = original(Path(CRDS) / "ray.io_rayservices.yaml", "v1")
    for values in (RAY, SCALED_RAY):
        check(manifests(values)["RayService", "loramux"], schema)
    pool, _ = pool_and_route()
    check(pool, original(Path(CRDS) / "inference.networking.k8s.io_inferencepools.yaml", "v1"))
    check(pool, INFERENCE_POOL)
    for place, wrong in (("serveConfig", "x"), ("rayClusterConfig", {"headGroupSpecs": {}})):
        with pytest.raises(AssertionError):
            check({**manifests(RAY)["RayService", "loramux"], "spec": {place: wrong}}, schema)


def test_ray_runs_the_engines_that_the_values_describe() -> None:
    spec = ray_service(SCALED_RAY)
    configuration = yaml.safe_load(spec["serveConfigV2"])
    assert configuration == {
        "proxy_location": "Disabled",
        "applications": [
            {
                "name": APP,
                "route_prefix": None,
                "import_path": "loramux.admin.serving.cluster_application:engines",
                "args": {
                    "model": "/models/base",
                    "served_name": "base",
                    "blob_url": "s3://example-adapters/production",
                    "device": "cuda",
                    "num_threads": 4,
                    "cluster_replicas": 2,
                    "cluster_max_replicas": 8,
                    "max_resident_adapters": 1024,
                    "sandbox": "required",
                    "pool_bytes": 68719476736,
                    "log_format": "json",
                },
            }
        ],
    }
    cluster = spec["rayClusterConfig"]
    assert cluster["rayVersion"] == RAY_VERSION
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["authOptions"] == {"mode": "token", "secretName": "ray-token"}
    assert cluster["gcsFaultToleranceOptions"]["redisAddress"] == "redis.example.com:6379"
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0", "the head runs no engine"
    (group,) = cluster["workerGroupSpecs"]
    assert (group["minReplicas"], group["maxReplicas"], group["rayStartParams"]) == (2, 8, {"num-cpus": "4"})
    plain = yaml.safe_load(ray_service(RAY)["serveConfigV2"])["applications"][0]["args"]
    assert plain["device"] == "cpu"
    assert "cluster_max_replicas" not in plain
    assert "gcsFaultToleranceOptions" not in ray_service(RAY)["rayClusterConfig"]


def test_engines_get_no_secret_of_the_servers() -> None:
    for pod in pods(SCALED_RAY):
        (container,) = pod["spec"]["containers"]
        assert "envFrom" not in container
        keys = {one["valueFrom"]["secretKeyRef"]["key"] for one in container["env"] if "valueFrom" in one}
        assert keys == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
    head, engine = pods(RAY)
    assert head["spec"]["automountServiceAccountToken"] is False
    assert engine["spec"]["automountServiceAccountToken"] is False


def test_servers_of_a_cluster_join_it() -> None:
    pod = manifests(RAY)["StatefulSet", "loramux"]["spec"]["template"]["spec"]
    (node,), (server,) = pod["initContainers"], pod["containers"]
    assert node["restartPolicy"] == "Always", "it ends after the server"
    environment = {one["name"]: one for one in server["env"]}
    assert environment["LORAMUX_CLUSTER"]["value"] == "loramux-head-svc:6379"
    assert "--address=loramux-head-svc:6379" in node["args"]
    assert environment["RAY_AUTH_TOKEN"] in node["env"]
    shared = {"tmp": "/tmp", "shm": "/dev/shm"}
    for container in (node, server):
        mounted = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        assert shared.items() <= mounted.items()


def test_code_in_a_ray_node_reads_no_secret_of_its_server() -> None:
    pod = manifests(RAY)["StatefulSet", "loramux"]["spec"]["template"]["spec"]
    (node,), (server,) = pod["initContainers"], pod["containers"]
    assert node["securityContext"]["runAsUser"] != pod["securityContext"]["runAsUser"]
    assert "runAsGroup" not in node["securityContext"], "the server uses the node's sockets"
    assert "runAsUser" not in server["securityContext"]
    assert {one["name"] for one in node["volumeMounts"]} == {"tmp", "shm"}
    assert "envFrom" not in node
    assert [one["name"] for one in node["env"] if "valueFrom" in one] == ["RAY_AUTH_TOKEN"]
    printed = subprocess.run(
        [*(word.replace("exec ray start", "umask; echo") for word in node["command"]), *node["args"]],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed.split() == ["0002", *node["args"]]


def test_the_service_of_kuberay_finds_the_head() -> None:
    """Its selector has the value that KubeRay gives the label app.kubernetes.io/name, unless the pod has another."""
    for pod in pods(RAY):
        assert "app.kubernetes.io/name" not in pod["metadata"]["labels"]


def test_nobody_reaches_the_dashboard_if_no_operator_is_named() -> None:
    policy = manifests({**RAY, "ray": {**RAY["ray"], "operatorFrom": []}})["NetworkPolicy", "loramux-ray"]["spec"]
    (nodes,) = policy["ingress"]
    assert len(nodes["from"]) == 2


def test_only_nodes_of_the_cluster_reach_the_ports_of_ray() -> None:
    rendered = manifests(RAY)
    servers = {"podSelector": {"matchLabels": SELECTOR}}
    nodes = {"podSelector": {"matchLabels": pods(RAY)[0]["metadata"]["labels"]}}
    policy = rendered["NetworkPolicy", "loramux-ray"]["spec"]
    assert policy["podSelector"] == nodes["podSelector"]
    assert pods(RAY)[1]["metadata"]["labels"] == pods(RAY)[0]["metadata"]["labels"] != SELECTOR
    everything, dashboard = policy["ingress"]
    assert everything == {"from": [nodes, servers]}
    assert dashboard["ports"] == [{"port": 8265}]
    assert dashboard["from"][0]["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}
    api, ray = rendered["NetworkPolicy", "loramux"]["spec"]["ingress"]
    assert api["ports"] == [{"port": "openai"}]
    assert ray["from"] == [nodes, servers]
    ports = {one for rule in ray["ports"] for one in range(rule["port"], rule["endPort"] + 1)}
    (node,) = rendered["StatefulSet", "loramux"]["spec"]["template"]["spec"]["initContainers"]
    used = {int(one.rpartition("=")[2]) for one in node["args"] if "-port=" in one}
    assert used <= ports
    assert ports.isdisjoint({8000, 8001})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        pytest.param({**RAY, "ray": {"enabled": True}}, "ray.tokenSecret is required", id="no token"),
        pytest.param({**RAY, "shareRequests": True}, "have no engines", id="sharing"),
        pytest.param({**PICKED, "picker": {"enabled": True}}, "picker.from is required", id="no picker"),
        pytest.param({**PICKED, "ray": RAY["ray"]}, "have no engines", id="a picker before Ray"),
        pytest.param({**RAY, "networkPolicy": {"enabled": False}}, "need networkPolicy", id="Ray's ports are open"),
        pytest.param({**PICKED, "networkPolicy": {"enabled": False}}, "need networkPolicy", id="the page is open"),
        pytest.param({**RAY, "settings": {"device": "cuda"}}, "remove settings.device", id="device"),
    ],
)
def test_values_that_contradict_each_other_are_refused(values: dict[str, Any], said: str) -> None:
    rendered = render(values)
    assert rendered.returncode != 0
    assert said in rendered.stderr


def test_servers_behind_a_picker_run_the_requests_that_it_sends(tmp_path: Path) -> None:
    rendered = manifests(PICKED)
    check_with_kubernetes([*rendered.values()], "1.33", tmp_path)
    pod = rendered["StatefulSet", "loramux"]["spec"]["template"]["spec"]
    server, proxy = pod["containers"]
    assert {"name": "LORAMUX_ROUTING", "value": "off"} in server["env"]
    assert proxy["ports"] == [{"name": "picker", "containerPort": 8003}]
    assert rendered["NetworkPolicy", "loramux"]["spec"]["ingress"][1] == {
        "ports": [{"port": "picker"}],
        "from": PICKED["picker"]["from"],
    }


def test_pool_selects_the_servers_and_the_route_uses_it() -> None:
    pool, route = pool_and_route()
    check(pool, INFERENCE_POOL)
    program = (
        "import {readFileSync} from 'node:fs';"
        "import {HTTPRoute} from '@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1';"
        "new HTTPRoute(JSON.parse(readFileSync(0))).validate()"
    )
    node = TOOLS.parent / "node"

    def validated(document: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["node", "--input-type=module", "-e", program],
            cwd=node,
            input=json.dumps(document),
            capture_output=True,
            text=True,
            check=False,
        )

    done = validated(route)
    assert done.returncode == 0, done.stderr
    wrong = json.loads(json.dumps(route).replace("PathPrefix", "PathSuffix"))
    assert validated(wrong).returncode != 0
    assert pool["spec"]["selector"]["matchLabels"] == SELECTOR
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert [one["path"]["value"] for one in route["spec"]["rules"][0]["matches"]] == ["/"], (
        "some paths are not below /v1"
    )
    assert (backend["kind"], backend["name"]) == (pool["kind"], pool["metadata"]["name"])
    (service,) = [one for (_, name), one in manifests(PICKED).items() if name == "loramux-servers"]
    assert pool["spec"]["targetPorts"] == [{"number": service["spec"]["ports"][0]["port"]}]
    assert service["spec"]["selector"] == SELECTOR


def test_llm_d_reads_the_page_and_scores_by_adapter() -> None:
    values = yaml.safe_load((RECIPES / "llm-d-values.yaml").read_text())
    check(values, LLM_D_VALUES)
    router = values["router"]
    assert router["modelServers"]["matchLabels"] == SELECTOR
    configuration = yaml.safe_load(router["epp"]["pluginsCustomConfig"][router["epp"]["pluginsConfigFile"]])
    check(configuration, ENDPOINT_PICKER_CONFIG)
    declared = {one["type"] for one in configuration["plugins"]}
    (profile,) = configuration["schedulingProfiles"]
    used = {one["pluginRef"] for one in profile["plugins"]}
    for source in configuration["dataLayer"]["sources"]:
        used |= {source["pluginRef"], *(one["pluginRef"] for one in source["extractors"])}
    assert used == declared
    (scraper,) = [one for one in configuration["plugins"] if one["type"] == "metrics-data-source"]
    pod = manifests(PICKED)["StatefulSet", "loramux"]["spec"]["template"]["spec"]
    assert scraper["parameters"]["port"] == pod["containers"][1]["ports"][0]["containerPort"]


class Scraped(http.server.BaseHTTPRequestHandler):
    """Stands for the admin listener."""

    seen: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers["authorization"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"vllm:num_requests_running 0\n")

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def running_nginx(folder: Path, servers: str) -> Iterator[None]:
    """Run nginx with these blocks inside of `http`."""
    configuration = folder / "nginx.conf"
    configuration.write_text(
        f"daemon off; pid {folder}/pid; error_log stderr; events {{}}\n"
        f"http {{ client_body_temp_path {folder}; proxy_temp_path {folder}; {servers} }}\n"
    )
    binary = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    assert binary is not None
    nginx = subprocess.Popen([binary, "-p", folder, "-c", configuration])
    try:
        yield
    finally:
        nginx.terminate()
        nginx.wait(20)


def patient_client(url: str = "") -> httpx.Client:
    """A client that waits until nginx listens."""
    return httpx.Client(base_url=url, trust_env=False, transport=httpx.HTTPTransport(retries=10))


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """nginx with the chart's configuration, and what it asked for."""
    seen: list[tuple[str, str | None]] = []
    admin = http.server.HTTPServer(("127.0.0.1", 0), type("Seen", (Scraped,), {"seen": seen}))
    threading.Thread(target=admin.serve_forever, daemon=True).start()
    template = manifests(PICKED)["ConfigMap", "loramux-picker-metrics"]["data"]["default.conf.template"]
    port = free_port()
    server = template.replace("${LORAMUX_METRICS_TOKEN}", "the-token-of-the-page")
    server = server.replace("listen 8003", f"listen 127.0.0.1:{port}").replace(":8001", f":{admin.server_port}")
    try:
        with running_nginx(tmp_path, server):
            yield f"http://127.0.0.1:{port}", seen
    finally:
        admin.shutdown()
        admin.server_close()


def test_the_proxy_shows_only_the_page(proxy: tuple[str, list[tuple[str, str | None]]]) -> None:
    url, seen = proxy
    with patient_client() as client:
        assert client.get(f"{url}/metrics").text == "vllm:num_requests_running 0\n"
        assert seen == [("/metrics/routing", "Bearer the-token-of-the-page")]
        for path in ("/", "/admin/v1/tenants", "/metrics/", "/metrics/routing"):
            assert client.get(f"{url}{path}").status_code == 404
    assert len(seen) == 1


class Received(http.server.BaseHTTPRequestHandler):
    """Stands for the OpenAI listener. It answers with the path and the number of bytes that it got."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        text = f"{self.path} {len(self.rfile.read(int(self.headers['content-length'])))}".encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None:
        pass


def test_the_documented_proxy_passes_on_what_clients_send(tmp_path: Path) -> None:
    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Received)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    (recipe,) = re.findall(r"```nginx\n(.*?)```", (ROOT / "docs" / "production.md").read_text(), re.DOTALL)
    upstreams, server, _ = re.split(r"^(?=server )", recipe, flags=re.MULTILINE)
    port = free_port()
    server = re.sub(r"\n +ssl_certificate.*", "", server).replace("listen 443 ssl", f"listen 127.0.0.1:{port}")
    upstreams = upstreams.replace("127.0.0.1:8000", f"127.0.0.1:{listener.server_port}")
    with running_nginx(tmp_path, upstreams + server), patient_client(f"http://127.0.0.1:{port}") as client:
        for path in ("/v1/completions", "/tokenize", "/v2/rerank", "/invocations", "/load_lora_adapter"):
            assert client.post(path, content=b"{}").text == f"{path} 2"
        size = Settings.model_fields["max_file_bytes"].default
        assert client.post("/v1/files", content=bytes(size)).text == f"/v1/files {size}"
        assert client.post("/v1/completions", content=bytes(5 << 20)).status_code == 413
    listener.shutdown()
    listener.server_close()
