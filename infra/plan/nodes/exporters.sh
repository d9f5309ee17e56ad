#!/bin/bash
# What a node shows to the cluster's monitor: node_exporter on port 9100, and where there are NVIDIA GPUs dcgm-exporter on 9400.
# Only in the bundle of a cluster that has a monitor: where the image lacks them, it reaches the network. Running it again changes
# nothing.
set -euo pipefail

# A test gives a folder that stands for /.
root="${LUSTRAIN_ROOT:-}"
# shellcheck source=infra/plan/nodes/packages.sh
source "$(dirname "$0")/packages.sh"
# Leaves time for the work: callers end all of this after five minutes.
lock_seconds=120
# The last one with the names and units that the dashboards ask for; 4.9 renames them
# (https://github.com/NVIDIA/dcgm-exporter/releases/tag/4.9.0).
dcgm_version=4.8.2
dcgm_repositories=https://developer.download.nvidia.com/compute/cuda/repos
# https://docs.nvidia.com/cuda/cuda-installation-guide-linux/
dcgm_key=EB693B3035CD5710E231E123A4B469963BF863CC
dcgm=datacenter-gpu-manager-exporter
dcgm_list="$root/etc/apt/sources.list.d/lustrain-cuda.list"

node_exporter() {
  if command -v prometheus-node-exporter >/dev/null; then
    return
  fi
  say "installing prometheus-node-exporter"
  apt update
  install_packages prometheus-node-exporter
}

# Of the package, with its epoch where it has one; empty where no source has it.
dcgm_package() {
  apt-cache madison "$dcgm" | awk '{print $3}' | grep -E -m 1 "^([0-9]+:)?${dcgm_version//./[.]}-" || true
}

# AWS's images may have this repository already; a second entry with another key file would end every `apt-get update`.
dcgm_source() {
  local key="$root/etc/apt/keyrings/nvidia-cuda.asc" machine release repository
  if grep -rqsF "$dcgm_repositories" "$root/etc/apt/sources.list.d" "$root/etc/apt/sources.list"; then
    return
  fi
  machine="$(uname -m)"
  # shellcheck source=/dev/null
  release="$(source "$root/etc/os-release" && echo "$ID${VERSION_ID//./}")"
  repository="$dcgm_repositories/$release/${machine/aarch64/sbsa}"
  mkdir -p "$(dirname "$key")" "$root/etc/apt/sources.list.d"
  curl -fsS --retry 8 --retry-delay 5 --max-time 120 -o "$key" "$repository/3bf863cc.pub"
  if ! is_key "$key" "$dcgm_key"; then
    rm "$key"
    say "$repository/3bf863cc.pub is not NVIDIA's key $dcgm_key; fix: take an image with dcgm-exporter"
    return 1
  fi
  echo "deb [signed-by=/etc/apt/keyrings/nvidia-cuda.asc] $repository/ /" >"$dcgm_list"
}

dcgm_exporter() {
  local version
  if command -v dcgm-exporter >/dev/null; then
    return
  fi
  dcgm_source
  apt update
  version="$(dcgm_package)"
  if [[ -z "$version" ]]; then
    say "no source of packages has $dcgm $dcgm_version; fix: take an image with dcgm-exporter"
    return 1
  fi
  say "installing $dcgm $version"
  install_packages "$dcgm=$version"
  apt-mark hold "$dcgm"
  # Further packages of CUDA must not come to a node by the way.
  rm -f "$dcgm_list"
}

# What the dashboards show, and no profiling fields: those would stand in the way of Nsight.
dcgm_unit() {
  local folder="$root/etc/systemd/system/nvidia-dcgm-exporter.service.d"
  mkdir -p "$folder" "$root/etc/lustrain"
  cat >"$root/etc/lustrain/dcgm-counters.csv" <<'COUNTERS'
DCGM_FI_DEV_GPU_UTIL, gauge, GPU utilisation in percent
DCGM_FI_DEV_FB_USED, gauge, Memory used in MiB
DCGM_FI_DEV_SM_CLOCK, gauge, SM clock in MHz
DCGM_FI_DEV_POWER_USAGE, gauge, Power in watts
DCGM_FI_DEV_GPU_TEMP, gauge, Temperature in degrees Celsius
COUNTERS
  cat >"$folder/lustrain.conf" <<'UNIT'
[Service]
ExecStart=
ExecStart=/usr/bin/dcgm-exporter -f /etc/lustrain/dcgm-counters.csv
StandardOutput=journal
StandardError=journal
Restart=always
RestartSec=30
UNIT
}

if ! command -v apt-get >/dev/null && ! command -v prometheus-node-exporter >/dev/null; then
  say "this image has neither prometheus-node-exporter nor apt-get; fix: take one with Ubuntu"
  exit 1
fi
node_exporter
systemctl enable --now prometheus-node-exporter.service
if [[ -e "$root/proc/driver/nvidia/version" ]]; then
  dcgm_unit
  dcgm_exporter
  systemctl daemon-reload
  systemctl enable nvidia-dcgm-exporter.service
  systemctl restart nvidia-dcgm-exporter.service
fi
say "exporters run"
