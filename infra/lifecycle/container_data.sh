#!/bin/bash
# Images and pods of an EKS node on a disk of their own: the root disk that HyperPod gives has 100 GB, and a full one ends the
# node (https://github.com/awslabs/awsome-distributed-ai/issues/187, pull requests 424 and 927). on_create.sh calls this before
# the node joins, and the unit that it makes calls it at every later boot: container_data.sh DISK.
# The folders of containerd and kubelet become bind mounts: CSI drivers take no link in the place of kubelet's, and nothing of
# an image's configuration is replaced, which differs between Amazon Linux 2 and 2023.
set -euo pipefail

# A test gives a folder that stands for /, and waits that do not wait.
root="${LUSTRAIN_ROOT:-}"
patience="${LUSTRAIN_WAIT_SECONDS:-300}"
log="$root/var/log/provision/provisioning.log"
disk="$1"
folders=(containerd kubelet)
copy="$root/usr/local/sbin/lustrain-container-data"
unit="$root/etc/systemd/system/lustrain-container-data.service"

say() {
  printf '%s lustrain: %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$*"
}

# The copy that the unit runs at later boots.
is_later_boot() {
  [[ "$0" == "$copy" ]]
}

# At a later boot containerd and kubelet wait for as long as it takes: systemd would not start them any more after a failure.
wait_for_disk() {
  local left="$patience"
  until [[ -n "$disk" ]] && mountpoint -q "$root$disk"; do
    if [[ -z "$disk" ]] || ((left <= 0)); then
      say "${disk:-a local disk} is not mounted: images and pods would fill the root disk of 100 GB;" \
        "fix: see why neither the group's EBS volume (/opt/sagemaker) nor instance store is there"
      if [[ -z "$disk" ]] || ! is_later_boot; then
        return 1
      fi
      say "containerd and kubelet wait for $disk"
      left="$patience"
    fi
    sleep 5
    left=$((left - 5))
  done
}

# A disk may outlive the root disk, as when HyperPod updates a node's software: what another image left is no good to this one.
# What the image brings along, such as the pause container, is copied.
fill() {
  local from="$1" to="$2"
  if [[ -d "$to" && -e "$copy" ]]; then
    return
  fi
  rm -rf "$to" "$to.new"
  cp -ax "$from" "$to.new"
  mv "$to.new" "$to"
}

# As after a stop and start of an instance with instance store, whose root disk stays.
came_back_empty() {
  [[ -e "$copy" && ! -d "$root$disk/lustrain/kubelet" ]]
}

# In a group of its own, or each of the pods' mounts would show up below the disk's folder as well.
cover() {
  mount --bind "$1" "$2"
  mount --make-private "$2"
  mount --make-shared "$2"
}

move() {
  local folder place running=() service
  for service in kubelet containerd; do
    if systemctl is-active --quiet "$service.service"; then
      systemctl stop "$service.service"
      running=("$service.service" ${running[@]+"${running[@]}"})
    fi
  done
  for folder in "${folders[@]}"; do
    place="$root/var/lib/$folder"
    if mountpoint -q "$place"; then
      continue
    fi
    mkdir -p "$place" "$root$disk/lustrain"
    fill "$place" "$root$disk/lustrain/$folder"
    cover "$root$disk/lustrain/$folder" "$place"
    say "/var/lib/$folder is on $disk"
  done
  # An empty array is unbound to the bash of Amazon Linux 2.
  for service in ${running[@]+"${running[@]}"}; do
    systemctl start "$service"
  done
}

moved() {
  local folder
  for folder in "${folders[@]}"; do
    mountpoint -q "$root/var/lib/$folder" || return 1
  done
}

at_every_boot() {
  if is_later_boot; then
    return
  fi
  mkdir -p "$(dirname "$copy")" "$(dirname "$unit")"
  cat >"$unit" <<UNIT
[Unit]
Description=Container images and pods on $disk, not on the root disk
After=local-fs.target dlami-nvme.service opt-dlami-nvme.mount opt-sagemaker.mount
Before=containerd.service kubelet.service

[Service]
Type=oneshot
RemainAfterExit=yes
TimeoutStartSec=0
ExecStart=/usr/local/sbin/lustrain-container-data $disk

[Install]
RequiredBy=containerd.service kubelet.service
UNIT
  systemctl daemon-reload
  systemctl enable lustrain-container-data.service
  # Last: it says that what lies on the disk belongs to this root disk.
  install -m 755 "$0" "$copy"
}

main() {
  wait_for_disk
  if ! moved; then
    if came_back_empty; then
      say "$disk came back empty: kubelet's state went with it, and this node has to join again; fix: replace the node"
      return 1
    fi
    move
  fi
  at_every_boot
}

# The first time node.sh writes what is said to the log.
if is_later_boot; then
  mkdir -p "$(dirname "$log")"
  main 2>&1 | tee -a "$log"
else
  main
fi
