# What a node does at its first boot. It may run again at any time: each step looks at what is there.

unit="$root/etc/systemd/system/lustrain-boot.service"
copy="$root/usr/local/sbin/lustrain-boot"
bundle="$root/opt/lustrain/bundle"
agent="$root/var/lib/lustrain/agent.pyz"
remark=""

# Since its first boot `fab node-tune` may have told the node more than this script and its bundle know.
first() {
  [[ "$0" != "$copy" ]]
}

# cloud-init runs user data once in a node's life; a reboot needs the mounts again, after the network.
at_every_boot() {
  mkdir -p "$(dirname "$copy")" "$(dirname "$unit")"
  if first; then
    install -m 755 "$0" "$copy"
  fi
  cat >"$unit" <<'UNIT'
[Unit]
Description=Mounts and settings of a Lustrain node
Wants=network-online.target
After=network-online.target

[Service]
Type=oneshot
RemainAfterExit=yes
TimeoutStartSec=170min
ExecStart=/usr/local/sbin/lustrain-boot

[Install]
WantedBy=multi-user.target
UNIT
  systemctl daemon-reload
  systemctl enable lustrain-boot.service
}

facts() {
  mkdir -p "$root/etc/lustrain"
  printf '%s\n' "$facts" >"$root/etc/lustrain/node.json"
}

# The deep-learning images carry the client; others get it from AWS's repository, which a closed network may not reach.
lustre_client() {
  local key=/usr/share/keyrings/fsx-ubuntu-public-key.gpg
  local repository=https://fsx-lustre-client-repo.s3.amazonaws.com/ubuntu
  if modprobe --dry-run lustre; then
    return
  fi
  say "no Lustre client in this image: installing"
  curl -fsS https://fsx-lustre-client-repo-public-keys.s3.amazonaws.com/fsx-ubuntu-public-key.asc |
    gpg --batch --yes --dearmor -o "$root$key"
  echo "deb [signed-by=$key] $repository $(lsb_release -cs) main" >"$root/etc/apt/sources.list.d/fsx-lustre-client.list"
  apt-get -o DPkg::Lock::Timeout=240 update -q
  DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=240 install -qy "lustre-client-modules-$(uname -r)"
}

# Before anything loads Lustre: what is mounted over TCP stays there. The agent knows how, here and at every later boot.
lnet_over_efa() {
  retry 2 300 python3 "$agent" lnet >/dev/null
}

# The client's own network is up before the mount: _netdev in fstab does not order it.
lustre_modules() {
  modprobe lnet
  modprobe lustre
}

lustre() {
  begin_step "Lustre client"
  # The node agent keeps this file, but comes later; the modules read it now, as they are loaded.
  if first && [[ -n "$lustre_options" ]]; then
    mkdir -p "$root/etc/modprobe.d"
    printf '%s' "$lustre_options" >"$root/etc/modprobe.d/lustrain-lustre.conf"
  fi
  retry 5 300 lustre_client
  begin_step "Lustre over EFA"
  if ((lustre_efa > 0)) && ! lnet_over_efa; then
    say "WARNING: LNet has no EFA network: Lustre goes over TCP"
    remark=" lustre-over-tcp"
  fi
  begin_step "Lustre network"
  retry 5 120 lustre_modules
  begin_step "mount of $lustre_path"
  mkdir -p "$root$lustre_path"
  if ! mountpoint -q "$root$lustre_path"; then
    retry 30 120 mount -t lustre -o noatime,flock,_netdev "$lustre_dns@tcp:/$lustre_mount" "$root$lustre_path"
  fi
}

home() {
  local aside="$root/run/lustrain/home"
  begin_step "mount of $home_path"
  mkdir -p "$root$home_path" "$aside"
  if mountpoint -q "$root$home_path"; then
    return
  fi
  if ! command -v mount.nfs4 >/dev/null; then
    DEBIAN_FRONTEND=noninteractive retry 5 300 apt-get -o DPkg::Lock::Timeout=240 install -qy nfs-common
  fi
  # A boot that was ended left it mounted.
  if ! mountpoint -q "$aside"; then
    retry 30 120 mount -t nfs4 -o "$home_options" "$home_source" "$aside"
  fi
  retry 10 "$patience" bash "$bundle/fill_homes.sh" "$root$home_path" "$aside"
  retry 3 120 umount "$aside"
  retry 30 120 mount -t nfs4 -o "$home_options" "$home_source" "$root$home_path"
}

lifecycle_bundle() {
  begin_step "lifecycle bundle"
  if first || [[ ! -f "$agent" || ! -f "$bundle/node.sh" ]]; then
    fetch_bundle "$bundle"
    agent="$bundle/node_setup.pyz"
  fi
}

# First, so that what fails later is known elsewhere. A node whose logs go nowhere still trains.
logs() {
  begin_step "logs"
  retry 1 540 bash "$bundle/logs.sh" || say "WARNING: logs of this node do not go to CloudWatch"
}

# The bundle's own steps are those of every backend: the node agent, then scratch on local disks.
from_bundle() {
  # The agent may wait for a mount, and installs what is missing; node.sh ends it, the mounts of buckets and the user's script
  # before this does.
  begin_step "node agent and scratch" $((4 * patience))
  export LUSTRAIN_WAIT_SECONDS="${LUSTRAIN_WAIT_SECONDS:-30}"
  # shellcheck disable=SC2016 # the inner bash expands it
  retry 1 $((4 * patience)) bash -c 'source "$1/node.sh" && boot "$2" ec2' boot "$bundle" "$agent"
}

# A node takes jobs once its file systems and settings are there. What the agent logs is in this log; its report is not.
slurm() {
  begin_step "Slurm" $((3 * patience))
  retry 2 $((3 * patience)) python3 "$agent" slurm-boot --request "$bundle/slurm.json" >/dev/null
}

# Last: jobs do not wait for it, and no packages come after an installation that is cut off. A node without exporters trains too.
exporters() {
  begin_step "exporters"
  retry 1 300 bash "$bundle/exporters.sh" || say "WARNING: not all exporters run: the monitor does not see this node, or not its GPUs"
}

begin_step "facts"
facts
at_every_boot
if [[ -n "$bundle_uri" ]]; then
  lifecycle_bundle
fi
if [[ -f "$bundle/logs.sh" ]]; then
  logs
fi
if [[ -n "$lustre_dns" ]]; then
  lustre
fi
if [[ -n "$home_source" ]]; then
  home
fi
if [[ -n "$bundle_uri" ]]; then
  from_bundle
fi
# The bundle of a cluster with a Slurm has this file.
if [[ -f "$bundle/slurm.json" ]]; then
  slurm
fi
if [[ -f "$bundle/exporters.sh" ]]; then
  exporters
fi
echo "ready$remark" >"$outcome"
say "ready$remark"
