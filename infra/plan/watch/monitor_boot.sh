# What the monitor does at its first boot. Once it has fetched the bundle, monitor.sh does the rest, now and at each boot.

folder="$root/opt/lustrain/monitor"
# Without it some versions of the CLI ask S3 in us-east-1, which a closed network does not reach.
export AWS_REGION="$region" AWS_DEFAULT_REGION="$region" PATH="$PATH:/snap/bin"

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

begin_step "lifecycle bundle" $((3 * patience))
fetch_bundle "$folder"
mkdir -p "$root/etc/lustrain" "$root/etc/systemd/system"
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
