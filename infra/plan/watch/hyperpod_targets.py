"""Write Prometheus's targets: the nodes of a HyperPod cluster, by AWS's CLI. Runs on the monitor, where nothing of ours is
installed, with Python's standard library.

The file is for `file_sd_configs`: one entry a node, its private address, and as labels its id, group and instance type. An
address stays with a node for life, so that only new nodes are looked at. A call that fails leaves the file as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

GONE = frozenset({"Pending", "ShuttingDown", "NotFound"})
"""Without an address yet, or on their way out. A node that fails stays a target: its silence is what an alert is for
(https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_ClusterInstanceStatusDetails.html)."""
META = "__meta_lustrain_"
CALL_S = 120
MOST_DESCRIBED = 200
"""Nodes that one run asks about, a second or two each: the unit has ten minutes, and the next run asks about others."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--cluster", "--region", "--output"):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    addresses = known(options.output)
    targets, failed, described = [], False, 0
    try:
        nodes = call_aws(options, "list-cluster-nodes")["ClusterNodeSummaries"]
        for node in sorted(nodes, key=lambda one: str(one["InstanceId"])):
            if node["InstanceStatus"]["Status"] in GONE:
                continue
            identity = node["InstanceId"]
            address = addresses.get(identity)
            if address is None and described < MOST_DESCRIBED:
                described += 1
                address = address_of(options, identity)
            if address:
                targets.append(target(node, address))
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        print(f"the targets stay as they are: {type(error).__name__}: {error}", file=sys.stderr)
        failed = True
    if not failed:
        write(options.output, targets)
    return int(failed)


def target(node: Any, address: str) -> dict[str, Any]:
    labels = {"node": node["InstanceId"], "group": node["InstanceGroupName"], "type": node["InstanceType"]}
    return {"targets": [address], "labels": {f"{META}{name}": value for name, value in labels.items()}}


def known(path: str) -> dict[str, str]:
    """Return the address of each node that the file names."""
    try:
        with open(path, encoding="utf-8") as file:
            return {one["labels"][f"{META}node"]: one["targets"][0] for one in json.load(file)}
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return {}


def address_of(options: argparse.Namespace, identity: str) -> str | None:
    details = call_aws(options, "describe-cluster-node", "--node-id", identity)["NodeDetails"]
    address = details.get("PrivatePrimaryIp")
    return str(address) if address else None


def call_aws(options: argparse.Namespace, verb: str, *words: str) -> Any:
    """Return the answer of AWS's CLI, which reads all pages."""
    command = ("aws", "sagemaker", verb, "--cluster-name", options.cluster, "--region", options.region, *words)
    done = subprocess.run([*command, "--output", "json"], capture_output=True, text=True, timeout=CALL_S)
    if done.returncode:
        raise OSError(f"aws sagemaker {verb}: {done.stderr.strip() or done.returncode}")
    return json.loads(done.stdout)


def write(path: str, targets: list[dict[str, Any]]) -> None:
    """Replace the file whole: Prometheus reads it at any moment."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(targets, file, indent=1)
    os.replace(f"{path}.new", path)


if __name__ == "__main__":
    sys.exit(main())
