#!/bin/bash
# What every node does at boot: on_init.sh, on_create.sh and the first boot of EC2 read this file and call `boot`
# with the packed agent and the backend.
# Running it again changes nothing. It reaches no network: what a node needs is in the image or in this bundle. Only mount_s3.sh
# and logs.sh may, which clusters with storage.s3_mounts or observability.logs have, and exporters.sh, which one with a monitor
# has.
set -euo pipefail

# A test gives a folder that stands for /, and waits that do not wait.
root="${LUSTRAIN_ROOT:-}"
wait_seconds="${LUSTRAIN_WAIT_SECONDS:-120}"
flush_seconds="${LUSTRAIN_FLUSH_SECONDS:-60}"
# The agent waits minutes for a lock or a mount; one that hangs would hold a machine that is billed.
agent_seconds="${LUSTRAIN_AGENT_SECONDS:-900}"
script_seconds="${LUSTRAIN_SCRIPT_SECONDS:-600}"
s3_seconds="${LUSTRAIN_S3_SECONDS:-600}"
exporters_seconds=300
# HyperPod carries this file to the cluster's log group, stream LifecycleConfig/<group>/<instance>.
log="$root/var/log/provision/provisioning.log"

say() {
  printf '%s lustrain: %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$*"
}

has_instance_store() {
  grep -qs 'Amazon EC2 NVMe Instance Storage' "$root"/sys/block/nvme*/device/model
}

# The service of AWS's images that gathers the instance store; where it is not, the agent did that a moment ago.
image_mounts() {
  systemctl cat dlami-nvme.service >/dev/null 2>&1
}

mounted_in_time() {
  local path="$1" left="$2"
  until mountpoint -q "$path"; do
    if ((left <= 0)); then
      return 1
    fi
    sleep 5
    left=$((left - 5))
  done
}

# The instance store is under /opt/dlami/nvme; HyperPod mounts the group's EBS volume on /opt/sagemaker.
scratch_disk() {
  local backend="$1" patience=0
  if has_instance_store; then
    if image_mounts; then
      patience="$wait_seconds"
    fi
    if mounted_in_time "$root/opt/dlami/nvme" "$patience"; then
      echo "$root/opt/dlami/nvme"
      return
    fi
    say "WARNING: instance store is there, but nothing has mounted /opt/dlami/nvme in $patience s" >&2
  fi
  if [[ "$backend" != ec2 ]] && mounted_in_time "$root/opt/sagemaker" "$wait_seconds"; then
    echo "$root/opt/sagemaker"
  fi
}

# /scratch is the same path on all nodes. A full root volume stops a node, so there is none of it on the root volume.
make_scratch() {
  local disk="$1"
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

are_copied() {
  local file
  while IFS= read -r -d '' file; do
    cmp -s "$1/$file" "$root/$file" || return 1
  done < <(cd "$1" && find . -type f -print0)
}

# The bundle's folder `root` holds files for every node: those of the company's proxy. A service that runs already is restarted
# where they are new; at a later boot they are there before it starts.
copy_files() {
  local files="$1/root" variables=etc/lustrain/proxy.env path unit
  if [[ ! -d "$files" ]]; then
    return
  fi
  if ! are_copied "$files"; then
    cp -R "$files/." "$root/"
    systemctl daemon-reload
    for path in "$files"/etc/systemd/system/*.service.d; do
      unit="${path##*/}"
      unit="${unit%.d}"
      if systemctl is-active --quiet "$unit"; then
        systemctl restart "$unit"
      fi
    done
  fi
  set -a
  # shellcheck source=/dev/null
  source "$root/$variables"
  set +a
}

# On EC2 the first boot has done it. A node whose logs go nowhere still trains.
carry_logs() {
  if [[ "$2" != ec2 && -f "$1/logs.sh" ]]; then
    timeout --kill-after=10 540 bash "$1/logs.sh" || say "WARNING: logs of this node do not go to CloudWatch"
  fi
}

# home.mount is there where nothing else mounts the homes, and holds source, path and options in one line. At a reboot nothing
# runs this: fstab mounts, without `nofail`, with which systemd would let slurmd and logins start before the homes are there.
# Where EFS does not answer, the boot goes on after 90 s without them (systemd.mount(5), DefaultTimeoutStartSec).
mount_home() {
  local source path options aside="$root/run/lustrain/home"
  if [[ ! -f "$1/home.mount" ]]; then
    return
  fi
  read -r source path options <"$1/home.mount"
  if mountpoint -q "$root$path"; then
    return
  fi
  if ! command -v mount.nfs4 >/dev/null; then
    say "there is no mount.nfs4 in this image, which $path needs; fix: take an image with nfs-common"
    return 1
  fi
  say "mounting $source on $path"
  mkdir -p "$root$path" "$aside"
  # A run that was ended left it mounted.
  if ! mountpoint -q "$aside"; then
    try 20 120 mount -t nfs4 -o "$options" "$source" "$aside"
  fi
  try 5 600 bash "$1/fill_homes.sh" "$root$path" "$aside"
  try 3 120 umount "$aside"
  if ! grep -qsF "$source $path nfs4 " "$root/etc/fstab"; then
    mkdir -p "$root/etc"
    printf '%s %s nfs4 %s 0 0\n' "$source" "$path" "$options" >>"$root/etc/fstab"
  fi
  try 20 120 mount -t nfs4 -o "$options" "$source" "$root$path"
}

# try TIMES SECONDS COMMAND...: each try has that long.
try() {
  local times="$1" limit="$2" n
  shift 2
  for ((n = 1; n <= times; n++)); do
    if timeout --kill-after=10 "$limit" "$@"; then
      return
    fi
    say "try $n of $times failed: $*"
    sleep 10
  done
  return 1
}

# A bucket that cannot be mounted fails the node: a job would write into an empty folder of the root disk.
mount_buckets() {
  local status=0
  if [[ ! -f "$1/mount_s3.sh" ]]; then
    return
  fi
  timeout --kill-after=10 "$s3_seconds" bash "$1/mount_s3.sh" || status=$?
  if ((status == 124 || status == 137)); then
    say "mounting the buckets was ended: not done in $s3_seconds s"
  fi
  return "$status"
}

# What the agent does and where it fails, it says on stderr; its stdout is the report that it keeps in /var/lib/lustrain.
run_agent() {
  local agent="$1" status=0
  if [[ ! -f "$agent" ]]; then
    say "there is no ${agent#"$root"}, so that nothing can set this node up; fix: \`pulumi up\` writes it anew"
    return 1
  fi
  if ! command -v python3 >/dev/null; then
    say "there is no python3 in this image, which the node agent needs; fix: take an image with Python 3.9 or later"
    return 1
  fi
  say "running the node agent"
  timeout --kill-after=30 "$agent_seconds" python3 "$agent" boot >/dev/null || status=$?
  # 137: it did not end when it was told to.
  if ((status == 124 || status == 137)); then
    say "the node agent was ended: not done in $agent_seconds s"
  fi
  return "$status"
}

# A node without them computes all the same; the dashboards' page of the cluster counts it among the targets that are down. On EC2
# the first boot runs them, after Slurm, whose packages an installation that was cut off would stand in the way of.
exporters() {
  if [[ "$2" != ec2 && -f "$1/exporters.sh" ]] && ! timeout --kill-after=30 "$exporters_seconds" bash "$1/exporters.sh"; then
    say "WARNING: not all exporters run: the monitor does not see this node, or not its GPUs"
  fi
}

# The user's script, once in a node's life and not at a later boot; where it fails, so does the node.
user_script() {
  local script="$1/on_configured.sh" done="$root/var/lib/lustrain/on_configured.sh" status=0
  if [[ ! -f "$script" ]] || cmp -s "$script" "$done"; then
    return
  fi
  say "running on_configured.sh"
  chmod 755 "$script"
  timeout --kill-after=30 "$script_seconds" "$script" || status=$?
  if ((status != 0)); then
    say "on_configured.sh ended with $status; fix: boot.on_configured of the cluster's description names this script"
    return "$status"
  fi
  mkdir -p "$(dirname "$done")"
  cp "$script" "$done"
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
  local agent="$1" backend="$2" disk
  mkdir -p "$(dirname "$log")"
  trap 'leave $?' EXIT
  {
    say "begin, $backend"
    copy_files "$(dirname "$agent")"
    carry_logs "$(dirname "$agent")" "$backend"
    mount_home "$(dirname "$agent")"
    mount_buckets "$(dirname "$agent")"
    # The agent first: it mounts the instance store where the image does not.
    run_agent "$agent"
    disk="$(scratch_disk "$backend")"
    make_scratch "$disk"
    if [[ "$backend" == eks ]]; then
      bash "$(dirname "$agent")/container_data.sh" "${disk#"$root"}"
    fi
    user_script "$(dirname "$agent")"
    # Last: an installation that takes too long must not stand in the way of the user's.
    exporters "$(dirname "$agent")" "$backend"
    say "end"
  } 2>&1 | tee -a "$log"
}
