#!/bin/bash
# HyperPod on EKS runs this on each node, new or replaced, before it joins. File systems come with the pods, by the CSI driver.
set -euo pipefail

folder="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=infra/lifecycle/node.sh
source "$folder/node.sh"

boot "$folder/node_setup.pyz" eks
