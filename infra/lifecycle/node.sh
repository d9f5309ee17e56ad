#!/bin/bash
# What every node does at boot: on_init.sh, on_create.sh and the first boot of EC2 read this file and call `boot`.
# Running it again changes nothing. It reaches no network: what a node needs is in the image or in this bundle.
set -euo pipefail

# A test gives a folder that stands for /, and waits that do not wait.
root="${LUSTRAIN_ROOT:-}"
wait_seconds="${LUSTRAIN_WAIT_SECONDS:-120}"
flush_seconds="${LUSTRAIN_FLUSH_SECONDS:-60}"
# HyperPod carries this file to the cluster's log group, stream LifecycleConfig/<group>/<instance>.
log="$root/var/log/provision/provisioning.log"

say() {
  printf '%s lustrain: %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$*"
}

has_instance_store() {
  grep -qs 'Amazon EC2 NVMe Instance Storage' "$root"/sys/block/nvme*/device/model
}

mounted_in_time() {
  local path="$1" left="$wait_seconds"
  until mountpoint -q "$path"; do
    if ((left <= 0)); then
      return 1
    fi
    sleep 5
    left=$((left - 5))
  done
}

# The image gathers the instance store under /opt/dlami/nvme; HyperPod mounts the group's EBS volume on /opt/sagemaker.
scratch_disk() {
  local backend="$1"
  if has_instance_store; then
    if mounted_in_time "$root/opt/dlami/nvme"; then
      echo "$root/opt/dlami/nvme"
      return
    fi
    say "WARNING: instance store is there, but the image has not mounted /opt/dlami/nvme in ${wait_seconds} s" >&2
  fi
  if [[ "$backend" != ec2 ]] && mounted_in_time "$root/opt/sagemaker"; then
    echo "$root/opt/sagemaker"
  fi
}

# /scratch is the same path on all nodes. A full root volume stops a node, so there is none of it on the root volume.
make_scratch() {
  local backend="$1" disk
  disk="$(scratch_disk "$backend")"
  if [[ -z "$disk" ]]; then
    say "WARNING: no local disk besides the root volume is mounted: this node has no /scratch"
    return
  fi
  if [[ -e "$root/scratch" && ! -L "$root/scratch" ]]; then
    say "/scratch is there already and is no link of ours: left as it is"
    return
  fi
  mkdir -p "$disk/scratch"
  chmod 1777 "$disk/scratch"
  ln -sfn "$disk/scratch" "$root/scratch"
  say "/scratch is on ${disk#"$root"}"
}

run_agent() {
  local agent="$1/node_setup.pyz" backend="$2"
  if [[ ! -f "$agent" ]]; then
    say "no node_setup.pyz in the bundle: this node runs with the image's settings"
    return
  fi
  say "running the node agent"
  python3 "$agent" boot --backend "$backend"
}

# A node that fails is taken away: what it said must be carried off before.
leave() {
  local status="$1"
  if ((status != 0)); then
    say "failed with $status" | tee -a "$log" >&2
    sync
    sleep "$flush_seconds"
  fi
  exit "$status"
}

boot() {
  local folder="$1" backend="$2"
  mkdir -p "$(dirname "$log")"
  trap 'leave $?' EXIT
  {
    say "begin, $backend"
    make_scratch "$backend"
    run_agent "$folder" "$backend"
    say "end"
  } 2>&1 | tee -a "$log"
}
