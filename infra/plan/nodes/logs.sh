#!/bin/bash
# Carries this node's logs to CloudWatch: has the CloudWatch agent there, and adds logs.json, which lies beside this script, to what
# it carries already. Running it again changes nothing.
set -euo pipefail

# A test gives a folder that stands for /.
root="${LUSTRAIN_ROOT:-}"
folder="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=infra/plan/nodes/packages.sh
source "$folder/packages.sh"
applied="$root/var/lib/lustrain/logs.json"
control="$root/opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl"
# Of August 2026: https://github.com/aws/amazon-cloudwatch-agent/releases
version=1.300072.0b1766
# https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/verify-CloudWatch-Agent-Package-Signature.html
key=937616F3450B7D806CBD9725D58167303B789C72
# AWS's page names this bucket alone for the file of keys; a closed network reaches none but its region's.
keys=assets/amazon-cloudwatch-agent.gpg
everywhere=https://amazoncloudwatch-agent.s3.amazonaws.com
# The region's own bucket, which the S3 gateway of a closed network reaches. Not on HyperPod, whose images have the agent.
source="$everywhere"
if [[ -n "${AWS_REGION:-}" ]]; then
  source="https://amazoncloudwatch-agent-$AWS_REGION.s3.$AWS_REGION.amazonaws.com"
fi
if [[ "${AWS_REGION:-}" == cn-* ]]; then
  source="$source.cn"
fi

# Of the package for amd64, as reported together with a valid signature by this key. One that it matches needs no file of keys,
# and any other has its signature checked.
digest=05baeadca96c4bb8e43906ed09cf0bebd0f321ff6d41987bdc46ce681de0978d

is_known() {
  echo "$digest  $1" | sha256sum --check --status
}

# has_signature FOLDER ADDRESS PACKAGE
has_signature() {
  fetch "$source/$keys" "$1/keys" amazon-cloudwatch-agent >/dev/null 2>&1 ||
    fetch "$everywhere/$keys" "$1/keys" amazon-cloudwatch-agent || return 1
  fetch "$2.sig" "$3.sig" amazon-cloudwatch-agent || return 1
  is_signed "$1" "$1/keys" "$3.sig" "$3" "$key"
}

install_agent() {
  local temporary="$1" address package
  if ! command -v dpkg >/dev/null; then
    say "no CloudWatch agent in this image, and no dpkg to install it; fix: take an image with the agent, or Ubuntu"
    return 1
  fi
  package="$temporary/amazon-cloudwatch-agent.deb"
  say "no CloudWatch agent in this image: installing $version"
  address="$source/ubuntu/$(dpkg --print-architecture)/$version/amazon-cloudwatch-agent.deb"
  fetch "$address" "$package" amazon-cloudwatch-agent
  if ! is_known "$package" && ! has_signature "$temporary" "$address" "$package"; then
    say "$address has no known signature by AWS's key for the agent, and is not installed; fix: take an image with the agent"
    return 1
  fi
  # Callers end this script after 540 s. A dpkg that is ended at its work refuses all later packages, so it begins in time or not.
  if ((SECONDS > 270)); then
    say "the download took $SECONDS s, too long to install the CloudWatch agent now; fix: reboot, or take an image with the agent"
    return 1
  fi
  DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=150 install -qy "$package"
}

# Jobs of all users leave copies of what they print here; systemd deletes what is a week old. The agent reads as root: it is the
# sticky bit for which the kernel follows no link of a user here (fs.protected_symlinks).
mkdir -p "$root/etc/tmpfiles.d" "$root/var/log/lustrain-jobs"
chmod 1777 "$root/var/log/lustrain-jobs"
echo "d /var/log/lustrain-jobs 1777 root root 7d" >"$root/etc/tmpfiles.d/lustrain-jobs.conf"
if [[ ! -x "$control" ]]; then
  temporary="$(mktemp -d)"
  trap 'rm -rf "$temporary"' EXIT
  install_agent "$temporary"
fi
if cmp -s "$folder/logs.json" "$applied" && systemctl is-active --quiet amazon-cloudwatch-agent; then
  exit
fi
# Not fetch-config, which would take away what HyperPod has the agent carry.
"$control" -a append-config -m ec2 -s -c "file:$folder/logs.json"
mkdir -p "$(dirname "$applied")"
cp "$folder/logs.json" "$applied"
say "logs of this node go to CloudWatch"
