# What follows is the same for every monitor. Once it has fetched the bundle, monitor.sh does the rest, now and at each boot.

# A test gives a folder that stands for /, and waits that do not wait.
root="${LUSTRAIN_ROOT:-}"
pause="${LUSTRAIN_PAUSE_SECONDS:-10}"
folder="$root/opt/lustrain/monitor"
# Without it some versions of the CLI ask S3 in us-east-1, which a closed network does not reach.
export AWS_REGION="$region" AWS_DEFAULT_REGION="$region" PATH="$PATH:/snap/bin"

ended() {
  local status=$?
  if ((status != 0)); then
    echo "the monitor's first boot failed with $status"
    # The machine runs and does nothing: the cluster's alarm counts this.
    timeout 60 aws cloudwatch put-metric-data --namespace Lustrain --metric-name FirstBootFailed \
      --dimensions "Cluster=$cluster" --unit Count --value 1 || true
  fi
}

retry() {
  local n
  for ((n = 1; n <= 10; n++)); do
    if timeout 300 "$@"; then
      return
    fi
    echo "try $n of 10 failed: $*"
    sleep "$pause"
  done
  return 1
}

install_cli() {
  # snapd does not see this script's environment.
  if [[ -n "${https_proxy:-}" ]]; then
    retry snap set system "proxy.http=${http_proxy:-}" "proxy.https=$https_proxy"
  fi
  retry snap install aws-cli --classic
}

environment() {
  printf '%s=%s\n' LUSTRAIN_CLUSTER "$cluster" AWS_REGION "$region" AWS_DEFAULT_REGION "$region" MONITOR_VOLUME "$volume_id" \
    MONITOR_FILES /opt/lustrain/monitor/root \
    PATH /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/snap/bin
  local name
  for name in http_proxy https_proxy no_proxy; do
    if [[ -n "${!name:-}" ]]; then
      printf '%s=%s\n' "$name" "${!name}"
    fi
  done
}

mkdir -p "$root/var/log" "$folder" "$root/etc/lustrain" "$root/etc/systemd/system"
exec >>"$root/var/log/lustrain-boot.log" 2>&1
trap ended EXIT
command -v aws >/dev/null || install_cli
retry aws s3 cp --recursive --only-show-errors "$bundle_uri" "$folder"
environment >"$root/etc/lustrain/monitor.env"
cat >"$root/etc/systemd/system/lustrain-monitor.service" <<'UNIT'
[Unit]
Description=Prometheus and Grafana of a Lustrain cluster
Wants=network-online.target
After=network-online.target

[Service]
Type=oneshot
RemainAfterExit=yes
EnvironmentFile=/etc/lustrain/monitor.env
TimeoutStartSec=60min
ExecStart=/bin/bash /opt/lustrain/monitor/monitor.sh

[Install]
WantedBy=multi-user.target
UNIT
systemctl daemon-reload
systemctl enable lustrain-monitor.service
# cloud-init's own boot must not wait for it.
systemctl start --no-block lustrain-monitor.service
