"""JSON schemas of resources that no package registry has. They allow only the fields that our manifests may use.

They are written from the documentation of KubeRay 1.6 (RayService), of the Gateway API's inference extension 1.0
(InferencePool), and of llm-d's router 0.10 (EndpointPickerConfig, and the values of its chart). Pod templates are
checked separately, with Kubernetes' own schemas.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
METADATA: Schema = {"type": "object"}
ANY: Schema = {"type": "object"}


def closed(properties: dict[str, Schema], *required: str) -> Schema:
    """Return the schema of an object without other properties."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def many(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def resource(api_version: str, kind: str, spec: Schema) -> Schema:
    head = {"apiVersion": {"const": api_version}, "kind": {"const": kind}, "metadata": METADATA}
    return closed({**head, "spec": spec}, "apiVersion", "kind", "metadata", "spec")


SECRET_KEY = closed({"valueFrom": closed({"secretKeyRef": closed({"name": TEXT, "key": TEXT}, "name", "key")})})
RAY_CLUSTER = closed(
    {
        "rayVersion": TEXT,
        "enableInTreeAutoscaling": {"type": "boolean"},
        "authOptions": closed({"mode": {"enum": ["disabled", "token"]}, "secretName": TEXT}),
        "gcsFaultToleranceOptions": closed({"redisAddress": TEXT, "redisPassword": SECRET_KEY}),
        "headGroupSpec": closed({"rayStartParams": TEXTS, "template": ANY}, "template"),
        "workerGroupSpecs": many(
            closed(
                {
                    "groupName": TEXT,
                    "replicas": COUNT,
                    "minReplicas": COUNT,
                    "maxReplicas": {"type": "integer", "minimum": 1},
                    "rayStartParams": TEXTS,
                    "template": ANY,
                },
                *("groupName", "minReplicas", "maxReplicas", "template"),
            )
        ),
    },
    "headGroupSpec",
)
RAY_SERVICE = resource(
    "ray.io/v1",
    "RayService",
    closed(
        {
            "excludeHeadPodFromServeSvc": {"type": "boolean"},
            "serveConfigV2": TEXT,
            "rayClusterConfig": RAY_CLUSTER,
        },
        "rayClusterConfig",
    ),
)
INFERENCE_POOL = resource(
    "inference.networking.k8s.io/v1",
    "InferencePool",
    closed(
        {
            "selector": closed({"matchLabels": TEXTS}, "matchLabels"),
            "targetPorts": {**many(closed({"number": PORT}, "number")), "maxItems": 1},
            "endpointPickerRef": closed(
                {
                    "name": TEXT,
                    "port": closed({"number": PORT}, "number"),
                    "failureMode": {"enum": ["FailOpen", "FailClose"]},
                },
                *("name", "port"),
            ),
        },
        *("selector", "targetPorts", "endpointPickerRef"),
    ),
)
PLUGINS = {
    "metrics-data-source": closed({"scheme": TEXT, "path": TEXT, "port": PORT, "interval": TEXT}),
    "core-metrics-extractor": closed({}),
    "lora-affinity-scorer": closed({}),
    "queue-scorer": closed({}),
    "kv-cache-utilization-scorer": closed({}),
    "prefix-cache-scorer": closed({}),
}
"""The parameters that each of llm-d's plugins may get from us."""
ENDPOINT_PICKER_CONFIG = closed(
    {
        "apiVersion": {"const": "llm-d.ai/v1alpha1"},
        "kind": {"const": "EndpointPickerConfig"},
        "plugins": many(
            {
                "oneOf": [
                    closed({"type": {"const": name}, "parameters": parameters}, "type")
                    for name, parameters in PLUGINS.items()
                ]
            }
        ),
        "dataLayer": closed(
            {"sources": many(closed({"pluginRef": TEXT, "extractors": many(closed({"pluginRef": TEXT}, "pluginRef"))}))}
        ),
        "schedulingProfiles": many(
            closed(
                {"name": TEXT, "plugins": many(closed({"pluginRef": TEXT, "weight": {"type": "number"}}, "pluginRef"))},
                *("name", "plugins"),
            )
        ),
    },
    *("apiVersion", "kind", "plugins", "schedulingProfiles"),
)
LLM_D_VALUES = closed(
    {
        "router": closed(
            {
                "modelServers": closed(
                    {
                        "type": {"const": "vllm"},
                        "protocol": {"const": "http"},
                        "targetPorts": many(closed({"number": PORT}, "number")),
                        "matchLabels": TEXTS,
                    },
                    "matchLabels",
                ),
                "epp": closed({"pluginsConfigFile": TEXT, "pluginsCustomConfig": TEXTS}),
            }
        ),
        "httpRoute": closed({"create": {"type": "boolean"}, "inferenceGatewayName": TEXT}),
    }
)


def original(path: Path, version: str) -> Schema:
    """Return the schema of a CustomResourceDefinition, in which unknown fields are errors."""
    definition = yaml.safe_load(path.read_text())
    (found,) = [one for one in definition["spec"]["versions"] if one["name"] == version]
    return _strict(found["schema"]["openAPIV3Schema"])


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {name: _strict(value) for name, value in schema.items()}
    if "properties" in schema and isinstance(schema["properties"], dict):
        is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
        if not is_open and schema.get("type") == "object":
            strict["additionalProperties"] = False
    return strict
