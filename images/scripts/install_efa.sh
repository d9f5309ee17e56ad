#!/bin/sh
# Installs EFA's user space (libfabric, rdma-core, the NCCL plugin) where it will run, from the settings in the environment:
# EFA_VERSION, EFA_SHA256, EFA_URL (https://…, or a path such as /site/aws-efa-installer-….tar.gz).
#
# In the stage that ships, because the installer replaces the system's rdma-core, which a copy of /opt/amazon would miss.
# Options: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start.html; --disable-*: https://github.com/awslabs/awsome-distributed-ai/pull/1153
set -eu
: "${EFA_VERSION:?}" "${EFA_SHA256:?a release is taken by its sha256 only}"
url=${EFA_URL:-https://efa-installer.amazonaws.com/aws-efa-installer-$EFA_VERSION.tar.gz}
scripts=$(dirname "$0")

die() {
    echo "install_efa: $*" >&2
    exit 1
}

at_least() {
    [ "$(printf '%s\n%s\n' "$1" "$EFA_VERSION" | sort -V | head -n 1)" = "$1" ]
}

printf '%s' "$EFA_VERSION" | grep -qE '^[0-9]+\.[0-9]+\.[0-9]+$' || die "EFA_VERSION = $EFA_VERSION: not a release like 1.2.3"
for ca in /run/secrets/ca /site/ca.crt; do
    [ ! -s "$ca" ] || export SSL_CERT_FILE="$ca"
done

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -B "$scripts/fetch.py" "$url" "$EFA_SHA256" "$folder/efa.tar.gz"
tar -C "$folder" --no-same-owner -xzf "$folder/efa.tar.gz"
[ -f "$folder/aws-efa-installer/efa_installer.sh" ] || die "$url: holds no aws-efa-installer/efa_installer.sh"

# The kernel's part and the limits are the node's; --no-verify, because a build machine has no EFA device.
set -- -y --skip-kmod --skip-limit-conf --no-verify
# From 1.48 on it takes a container for one of NVIDIA's and leaves rdma-core and the plugin out, unless told not to.
! at_least 1.48.0 || set -- "$@" --disable-ngc --disable-build-ngc
export DEBIAN_FRONTEND=noninteractive
(cd "$folder/aws-efa-installer" && ./efa_installer.sh "$@") >"$folder/log" 2>&1 || {
    tail -n 40 "$folder/log" >&2
    die "efa_installer.sh $* failed"
}

installed=/opt/amazon/efa_installed_packages
grep -qwF "EFA installer version: $EFA_VERSION" "$installed" || die "$installed does not name $EFA_VERSION"
# Since 1.44 in a folder of its own; lib on Debian's family, lib64 on Red Hat's.
plugin=
for file in /opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so /opt/amazon/ofi-nccl/lib64/libnccl-net-ofi.so \
    /opt/amazon/ofi-nccl/lib/*/libnccl-net-ofi.so /opt/amazon/ofi-nccl/lib/libnccl-net.so; do
    [ -n "$plugin" ] || [ ! -e "$file" ] || plugin=$file
done
[ -n "$plugin" ] || die "the installer left no libnccl-net-ofi.so below /opt/amazon/ofi-nccl"
echo "${plugin%/*}" >/etc/ld.so.conf.d/lustrain-ofi-nccl.conf
ldconfig
for file in "$plugin" /opt/amazon/efa/bin/fi_info; do
    # libcudart and libcuda come with the wheels and with the driver.
    missing=$(ldd "$file" | grep 'not found' | grep -v 'libcud' || true)
    [ -z "$missing" ] || die "$file: $missing"
done
/opt/amazon/efa/bin/fi_info --version | grep 'libfabric:' || die "fi_info does not tell its libfabric's version"
echo "$plugin"
