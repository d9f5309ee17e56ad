#!/bin/bash
# Mounts the buckets of storage.s3_mounts: installs the units that lie beside this script, and where the image has no mount-s3,
# that too. Running it again changes nothing.
set -euo pipefail

# A test gives a folder that stands for /.
root="${LUSTRAIN_ROOT:-}"
units="$(dirname "$0")/s3_mounts"
# shellcheck source=infra/plan/nodes/packages.sh
source "$(dirname "$0")/packages.sh"
version=1.24.0
release=https://s3.amazonaws.com/mountpoint-s3-release
# AWS's key since its older one expired, a month before this version:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/mountpoint-installation.html#mountpoint-install-verify
key=8AEFE705EBE329C0948C75A66F1C3B3AEF4B030B

install_client() {
  local folder="$1" machine kind=rpm package
  machine="$(uname -m)"
  if command -v apt-get >/dev/null; then
    kind=deb
  fi
  package="mount-s3-$version-${machine/aarch64/arm64}.$kind"
  say "no mount-s3 in this image: installing $package"
  fetch "$release/public_keys/KEYS" "$folder/KEYS" mount-s3
  fetch "$release/$version/${machine/aarch64/arm64}/$package" "$folder/$package" mount-s3
  fetch "$release/$version/${machine/aarch64/arm64}/$package.asc" "$folder/$package.asc" mount-s3
  if ! is_signed "$folder" "$folder/KEYS" "$folder/$package.asc" "$folder/$package" "$key"; then
    say "$package is not signed by AWS's key for Mountpoint, and is not installed; fix: take an image with mount-s3"
    return 1
  fi
  if [[ "$kind" == deb ]]; then
    apt update
    apt install -y "$folder/$package"
  else
    yum install -q -y "$folder/$package"
  fi
}

# A role that was made a moment ago may not be known to S3 yet.
mount_bucket() {
  local unit="$1" path="$2" n
  for ((n = 1; n <= 10; n++)); do
    if systemctl start "$unit" && mountpoint -q "$root$path"; then
      say "a bucket is mounted at $path"
      return
    fi
    sleep 10
  done
  systemctl status --no-pager --lines=20 "$unit" || true
  say "no bucket is mounted at $path; fix: journalctl -u $unit says why, often a right of the nodes' role or the bucket's policy"
  return 1
}

if ! command -v mount-s3 >/dev/null; then
  temporary="$(mktemp -d)"
  trap 'rm -rf "$temporary"' EXIT
  install_client "$temporary"
fi
mkdir -p "$root/etc/systemd/system"
cp "$units"/*.service "$root/etc/systemd/system/"
systemctl daemon-reload
while read -r unit path; do
  systemctl enable "$unit"
  # What it prints must not be taken for further lines of the list.
  mount_bucket "$unit" "$path" </dev/null
done <"$units/list"
