"""Deploys a configuration of Ray Serve, as an operator for Kubernetes does.

`python -m tests.cluster.configured ADDRESS DOCUMENT`. DOCUMENT is the configuration as JSON. It is checked with Ray's
own schema. The replicas start after this program has ended.
"""

from __future__ import annotations

import json
import sys

from loramux.platform.cluster.ray_connection import connect, disconnect


def main(address: str, document: str) -> None:
    connect(address)
    from ray.serve._private.api import serve_start
    from ray.serve.schema import ServeDeploySchema

    configuration = ServeDeploySchema.model_validate(json.loads(document))
    client = serve_start(proxy_location=configuration.proxy_location)
    client.deploy_apps(configuration)
    disconnect()


if __name__ == "__main__":
    main(*sys.argv[1:])
