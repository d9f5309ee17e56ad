#!/bin/bash
# Sets the monitor up at each boot: its data volume, its programs, its files. Where all is there it reaches no network. The
# outcome is the first word of /var/lib/lustrain/boot: ready, or failed and the step.
#
# MONITOR_FILES: the folder of `monitor_files`, each file at its path below it. MONITOR_VOLUME: id of the data volume.
# LUSTRAIN_CLUSTER: whose nodes are watched. AWS_REGION, for the alarm.
set -euo pipefail
PATH="$PATH:/snap/bin"

# A test gives a folder that stands for /, and waits that do not wait.
root="${LUSTRAIN_ROOT:-}"
# shellcheck source=infra/plan/nodes/packages.sh
source "$(dirname "$0")/packages.sh"
patience="${LUSTRAIN_STEP_SECONDS:-600}"
data=/var/lib/lustrain-monitor
outcome="$root/var/lib/lustrain/boot"
step=begin
# Its repository keeps every version, under this key: https://grafana.com/docs/grafana/latest/setup-grafana/installation/debian/
grafana_version=12.4.3
grafana_repository=https://apt.grafana.com
grafana_key=B53AE77BADB630A683046005963FA27710458545
# For a workspace of AMP alone; see infra/plan/watch/monitor.py. Its digests by dpkg's names of architectures, as in
# https://github.com/boxcutter/oci (prometheus/2.53), which pins the same.
release=2.53.4
releases=https://github.com/prometheus/prometheus/releases/download
declare -A digests=(
  [amd64]=b8b497c4610d1b93208252b60c8f20f6b2e78596ae8df43397a2e805aa53d475
  [arm64]=ec7236ecea7154d0bfe142921708b1ae7b5e921e100e0ee85ab92b7c444357e0
)

ended() {
  local status=$?
  if ((status != 0)); then
    say "failed with $status at: $step"
    echo "failed $step" >"$outcome"
    # The cluster's alarm counts this; see boot_steps.sh.
    timeout 60 aws cloudwatch put-metric-data --namespace Lustrain --metric-name FirstBootFailed \
      --dimensions "Cluster=$LUSTRAIN_CLUSTER" --unit Count --value 1 || say "WARNING: CloudWatch does not know of this"
  fi
}

# An NVMe drive's serial number is the volume's id without its dash
# (https://docs.aws.amazon.com/ebs/latest/userguide/identify-nvme-ebs-device.html).
device() {
  local file serial
  for file in "$root"/sys/block/*/device/serial; do
    if [[ -f "$file" ]] && read -r serial <"$file" && [[ "$serial" == "${MONITOR_VOLUME/-/}" ]]; then
      file="${file%/device/serial}"
      echo "/dev/${file##*/}"
      return
    fi
  done
}

# It is attached once the machine runs. What holds something, or cannot be read, is never formatted.
data_volume() {
  local disk="" left="$patience" kind="" status=0 uuid
  until disk="$(device)" && [[ -n "$disk" ]]; do
    if ((left <= 0)); then
      say "volume $MONITOR_VOLUME is not attached after $patience s; fix: aws ec2 describe-volumes --volume-ids $MONITOR_VOLUME"
      return 1
    fi
    sleep "$pause"
    left=$((left - (pause > 0 ? pause : 1)))
  done
  if ! command -v mkfs.xfs >/dev/null; then
    apt update
    install_packages xfsprogs
  fi
  # 2: nothing that blkid knows, and an error of the disk too (blkid(8)).
  kind="$(blkid -p -s TYPE -o value "$disk")" || status=$?
  if ((status == 2)) && cmp -s -n 1048576 "$disk" /dev/zero; then
    say "formatting $disk, volume $MONITOR_VOLUME"
    timeout 300 mkfs.xfs -K "$disk"
  elif ((status != 0)) || [[ "$kind" != xfs ]]; then
    say "$disk holds ${kind:-something unknown} and is left as it is; fix: mkfs.xfs -f $disk, where it may be erased"
    return 1
  fi
  uuid="$(blkid -p -s UUID -o value "$disk")"
  mkdir -p "$root$data" "$root/etc"
  if ! grep -qsF " $data xfs " "$root/etc/fstab"; then
    # nofail: without its data the machine still boots, and can be looked at; the units wait for the mount.
    echo "UUID=$uuid $data xfs noatime,nofail 0 2" >>"$root/etc/fstab"
    systemctl daemon-reload
  fi
  if ! mountpoint -q "$root$data"; then
    try 5 120 mount "$root$data"
  fi
  # The volume may have grown.
  xfs_growfs "$root$data" >/dev/null
}

# Before the packages: what they start by themselves is ours from the first moment, and listens on 127.0.0.1 alone.
put_files() {
  cp -R "$MONITOR_FILES/." "$root/"
  systemctl daemon-reload
}

grafana_source() {
  local key="$root/etc/apt/keyrings/grafana.asc"
  mkdir -p "$(dirname "$key")" "$root/etc/apt/sources.list.d"
  try 5 120 curl -fsS --max-time 100 -o "$key" "$grafana_repository/gpg.key"
  if ! is_key "$key" "$grafana_key"; then
    rm "$key"
    say "$grafana_repository/gpg.key is not Grafana Labs' key $grafana_key; fix: observability.grafana: none"
    return 1
  fi
  echo "deb [signed-by=/etc/apt/keyrings/grafana.asc] $grafana_repository stable main" >"$root/etc/apt/sources.list.d/grafana.list"
}

version_of() {
  dpkg-query -W -f '${db:Status-Status} ${Version}' "$1" 2>/dev/null | sed -n 's/^installed //p'
}

# Those of Ubuntu's archive have the version of its release; it keeps no older ones.
programs() {
  local one wanted=()
  for one in $packages; do
    [[ -n "$(version_of "$one")" ]] || wanted+=("$one")
  done
  if [[ "$grafana" == self && "$(version_of grafana)" != "$grafana_version" ]]; then
    grafana_source
    wanted+=("grafana=$grafana_version")
  fi
  if ((${#wanted[@]} == 0)); then
    return
  fi
  say "installing ${wanted[*]}"
  apt update
  # Its own grafana is held, and a newer version of this script may want another.
  install_packages --allow-change-held-packages "${wanted[@]}"
  if [[ "$grafana" == self ]]; then
    apt-mark hold grafana
  fi
}

# User, unit and sandbox are those of Ubuntu's package.
signing_prometheus() {
  local program="$root/usr/local/bin/prometheus" machine name folder
  if [[ "$prometheus" != amp || "$("$program" --version 2>&1)" == *"version $release "* ]]; then
    return
  fi
  machine="$(dpkg --print-architecture)"
  name="prometheus-$release.linux-$machine"
  folder="$(mktemp -d)"
  say "installing $name"
  try 5 300 curl -fsSL --max-time 280 -o "$folder/archive" "$releases/v$release/$name.tar.gz"
  if ! sha256sum --check --status <<<"${digests[$machine]}  $folder/archive"; then
    rm -r "$folder"
    say "$name.tar.gz has another SHA-256 than ${digests[$machine]}; fix: observability.prometheus: self"
    return 1
  fi
  tar -xzf "$folder/archive" -C "$folder" "$name/prometheus"
  mkdir -p "$(dirname "$program")"
  install -m 755 "$folder/$name/prometheus" "$program"
  rm -r "$folder"
}

own_folders() {
  local one
  for one in $folders; do
    mkdir -p "$root$data/${one%:*}"
    chown -R "${one#*:}:${one#*:}" "$root$data/${one%:*}"
  done
}

random() {
  head -c 24 /dev/urandom | base64 | tr '+/' '-_'
}

# On the data volume, beside Grafana's database, which keeps what it began with.
password() {
  local file="$root$data/grafana.env"
  if [[ "$grafana" != self || -s "$file" ]]; then
    return
  fi
  (
    umask 077
    printf 'GF_SECURITY_ADMIN_PASSWORD=%s\nGF_SECURITY_SECRET_KEY=%s\n' "$(random)" "$(random)" >"$file.new"
  )
  mv "$file.new" "$file"
}

start() {
  local one
  for one in $units; do
    systemctl enable "$one"
    systemctl restart "$one"
  done
}

answer() {
  local one
  for one in $answers; do
    if ! try $((patience / 10 + 1)) 30 curl -fsS --noproxy '*' --max-time 20 -o /dev/null "$one"; then
      say "$one does not answer; fix: systemctl status $units"
      return 1
    fi
    say "$one answers"
  done
}

mkdir -p "$root/var/log" "$(dirname "$outcome")"
exec >>"$root/var/log/lustrain-boot.log" 2>&1
trap ended EXIT
# From systemd, whose limit ends what tries again for an hour.
trap 'exit 143' TERM
say "begin, monitor of $LUSTRAIN_CLUSTER"
step="data volume"
data_volume
step="files"
put_files
packages="" prometheus="" grafana="" units="" folders="" answers=""
# shellcheck source=/dev/null
source "$root/etc/lustrain/monitor/boot.env"
step="programs"
programs
signing_prometheus
own_folders
password
step="start"
start
step="answer"
answer
echo ready >"$outcome"
say ready
