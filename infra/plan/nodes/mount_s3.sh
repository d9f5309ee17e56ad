#!/bin/bash
# Mounts the buckets of storage.s3_mounts: installs the units that lie beside this script, and where the image has no mount-s3,
# that too. Running it again changes nothing.
set -euo pipefail

# A test gives a folder that stands for /.
root="${LUSTRAIN_ROOT:-}"
units="$(dirname "$0")/s3_mounts"
version=1.24.0
release=https://s3.amazonaws.com/mountpoint-s3-release
# AWS's key since its older one expired, a month before this version:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/mountpoint-installation.html#mountpoint-install-verify
key=8AEFE705EBE329C0948C75A66F1C3B3AEF4B030B

say() {
  printf '%s lustrain: %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$*"
}

fetch() {
  if ! curl -fsS --retry 8 --retry-delay 5 --max-time 120 -o "$2" "$1"; then
    say "cannot download $1; fix: let nodes reach it, or take an image with mount-s3"
    return 1
  fi
}

# The file of keys comes from where the package comes from: only the fingerprint says whose they are. The last word of VALIDSIG
# is that of the primary key.
is_signed() {
  local folder="$1" package="$2" status signer
  export GNUPGHOME="$folder"
  gpg --batch --quiet --import "$folder/KEYS"
  status="$(gpg --batch --status-fd 1 --verify "$package.asc" "$package" 2>/dev/null)" || return 1
  signer="$(sed -n 's/^\[GNUPG:\] VALIDSIG .* //p' <<<"$status")"
  [[ "$status" != *REVKEYSIG* && "$signer" == "$key" ]]
}

install_client() {
  local folder="$1" machine kind=rpm package
  machine="$(uname -m)"
  if command -v apt-get >/dev/null; then
    kind=deb
  fi
  package="mount-s3-$version-${machine/aarch64/arm64}.$kind"
  say "no mount-s3 in this image: installing $package"
  fetch "$release/public_keys/KEYS" "$folder/KEYS"
  fetch "$release/$version/${machine/aarch64/arm64}/$package" "$folder/$package"
  fetch "$release/$version/${machine/aarch64/arm64}/$package.asc" "$folder/$package.asc"
  if ! is_signed "$folder" "$folder/$package"; then
    say "$package is not signed by AWS's key for Mountpoint, and is not installed; fix: take an image with mount-s3"
    return 1
  fi
  if [[ "$kind" == deb ]]; then
    apt-get -o DPkg::Lock::Timeout=240 update -q
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=240 install -qy "$folder/$package"
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
