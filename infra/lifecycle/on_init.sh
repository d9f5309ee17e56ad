#!/bin/bash
# HyperPod with Slurm runs this on each node, new or replaced, after its own set-up: Slurm runs, file systems are mounted.
set -euo pipefail

folder="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=infra/lifecycle/node.sh
source "$folder/node.sh"

boot "$folder/node_setup.pyz" slurm
