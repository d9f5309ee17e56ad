# What follows is the same on all nodes; the lines above are the cluster's. It may run again at any time: each step looks
# at what is there. The outcome is the first word of /var/lib/lustrain/boot: ready, or failed and the step.

# A test gives a folder that stands for /, and waits that do not wait.
root="${LUSTRAIN_ROOT:-}"
pause="${LUSTRAIN_PAUSE_SECONDS:-10}"
outcome="$root/var/lib/lustrain/boot"
unit="$root/etc/systemd/system/lustrain-boot.service"
copy="$root/usr/local/sbin/lustrain-boot"
bundle="$root/opt/lustrain/bundle"
step=begin
remark=""

say() {
  printf '%s lustrain: %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$*"
}

ended() {
  local status=$?
  if ((status != 0)); then
    say "failed with $status at: $step"
    echo "failed $step" >"$outcome"
    tell
  fi
}

# The group sees a running machine and nothing else, so the cluster's alarm counts this. It cannot make the boot any worse.
tell() {
  command -v aws >/dev/null || timeout 120 snap install aws-cli --classic || true
  if timeout 60 aws cloudwatch put-metric-data --namespace Lustrain --metric-name FirstBootFailed \
    --dimensions "Cluster=$cluster" --unit Count --value 1; then
    say "CloudWatch knows"
  else
    say "WARNING: CloudWatch does not know of this: the metric could not be written"
  fi
}

# retry TIMES COMMAND... In a condition bash would run on after an error inside of COMMAND, hence the subshell beside one.
retry() {
  local times="$1" n status
  shift
  for ((n = 1; n <= times; n++)); do
    set +e
    (
      set -e
      "$@"
    )
    status=$?
    set -e
    if ((status == 0)); then
      return
    fi
    say "try $n of $times failed: $*"
    sleep "$pause"
  done
  return 1
}

# cloud-init runs user data once in a node's life; a reboot needs the mounts again, after the network.
at_every_boot() {
  mkdir -p "$(dirname "$copy")" "$(dirname "$unit")"
  if [[ "$0" != "$copy" ]]; then
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
  apt-get update -q
  DEBIAN_FRONTEND=noninteractive apt-get install -qy "lustre-client-modules-$(uname -r)"
}

efa_devices() {
  local device
  for device in "$root"/sys/class/infiniband/*; do
    if [[ "$(readlink -f "$device/device/driver")" == */efa ]]; then
      basename "$device"
    fi
  done
}

over_efa() {
  [[ "$(lnetctl net show --net efa)" == *@efa* ]]
}

# Modules and LNet before the mount: _netdev in fstab orders neither.
lustre_network() {
  local interface devices count n
  interface="$(ip -o -4 route show to default | awk '{print $5; exit}')"
  modprobe lnet
  if ((lustre_efa > 0)) && modprobe kefalnd "ipif_name=$interface"; then
    modprobe ksocklnd
    lnetctl lnet configure
    if [[ "$(lnetctl net show --net tcp)" != *@tcp* ]]; then
      lnetctl net add --net tcp --if "$interface"
    fi
    if ! over_efa; then
      mapfile -t devices < <(efa_devices)
      count=$((lustre_efa < ${#devices[@]} ? lustre_efa : ${#devices[@]}))
      for ((n = 0; n < count; n++)); do
        lnetctl net add --net efa --if "${devices[n * ${#devices[@]} / count]}" --peer-credits 32
      done
      lnetctl set discovery 1
      lnetctl udsp add --src efa --priority 0
    fi
  fi
  modprobe lustre
}

lustre() {
  local line
  step="Lustre client"
  mkdir -p "$root/etc/modprobe.d"
  for line in "${lustre_modules[@]}"; do
    echo "options $line"
  done >"$root/etc/modprobe.d/lustrain-lustre.conf"
  retry 5 lustre_client
  step="Lustre network"
  retry 5 lustre_network
  if ((lustre_efa > 0)) && ! over_efa; then
    say "WARNING: LNet has no EFA interface: Lustre goes over TCP"
    remark=" lustre-over-tcp"
  fi
  step="mount of $lustre_path"
  mkdir -p "$root$lustre_path"
  if ! mountpoint -q "$root$lustre_path"; then
    retry 30 mount -t lustre -o noatime,flock,_netdev "$lustre_dns@tcp:/$lustre_mount" "$root$lustre_path"
  fi
  step="Lustre parameters"
  for line in "${lustre_parameters[@]}"; do
    lctl set_param "$line"
  done
}

# What the image has in its home folder (keys, shell settings) goes along, or nobody could log in.
home() {
  local source="$home_dns:/fsx" aside="$root/run/lustrain/home"
  local options=nfsvers=4.2,nconnect=16,rsize=1048576,wsize=1048576,timeo=600,hard,noatime,_netdev
  step="mount of $home_path"
  mkdir -p "$root$home_path" "$aside"
  if mountpoint -q "$root$home_path"; then
    return
  fi
  if ! command -v mount.nfs4 >/dev/null; then
    DEBIAN_FRONTEND=noninteractive retry 5 apt-get install -qy nfs-common
  fi
  retry 30 mount -t nfs4 -o "$options" "$source" "$aside"
  cp -an "$root$home_path/." "$aside/"
  umount "$aside"
  retry 30 mount -t nfs4 -o "$options" "$source" "$root$home_path"
}

# The bundle's own steps are those of every backend: scratch on local disks, then the node agent.
from_bundle() {
  step="lifecycle bundle"
  mkdir -p "$bundle"
  if ! command -v aws >/dev/null; then
    retry 5 snap install aws-cli --classic
  fi
  retry 10 aws s3 cp --recursive --only-show-errors "$bundle_uri" "$bundle"
  # shellcheck disable=SC2016 # the inner bash expands it
  LUSTRAIN_WAIT_SECONDS="${LUSTRAIN_WAIT_SECONDS:-30}" bash -c 'source "$1/node.sh" && boot "$1" ec2' boot "$bundle"
}

mkdir -p "$root/var/log" "$(dirname "$outcome")"
exec >>"$root/var/log/lustrain-boot.log" 2>&1
trap ended EXIT
say "begin"
step="facts"
facts
at_every_boot
if [[ -n "$lustre_dns" ]]; then
  lustre
fi
if [[ -n "$home_dns" ]]; then
  home
fi
if [[ -n "$bundle_uri" ]]; then
  from_bundle
fi
echo "ready$remark" >"$outcome"
say "ready$remark"
