#!/bin/sh
# Installs Debian packages, and EFA where EFA_VERSION is set, and leaves nothing behind that a second build would not leave
# too: packages.sh PACKAGE...
set -eu
# All that is newer was written by this build step (settle.sh).
touch /tmp/began
export DEBIAN_FRONTEND=noninteractive
# Docker's Debian images throw the archives away, which the cache mount is there to keep.
rm -f /etc/apt/apt.conf.d/docker-clean
# Also for the installer of EFA, which calls apt itself: what is only recommended has servers and setgid programs in it.
echo 'APT::Install-Recommends "false";' >/etc/apt/apt.conf.d/99lustrain
apt-get -qq -o Acquire::Retries=5 update
# Without a sync after each file: a step that the machine does not survive is run again.
apt-get -qq -o Acquire::Retries=5 -o APT::Keep-Downloaded-Packages=true -o Dpkg::Options::=--force-unsafe-io \
    install -y --no-install-recommends "$@" >/dev/null
[ -z "${EFA_VERSION:-}" ] || "$(dirname "$0")/install_efa.sh"
rm /etc/apt/apt.conf.d/99lustrain

# What differs between two equal installations: logs, caches, backups, and the day on which a user was made.
rm -rf /var/log/* /var/cache/ldconfig/aux-cache /var/cache/debconf/*-old /var/lib/dpkg/*-old
rm -f /etc/passwd- /etc/group- /etc/shadow- /etc/gshadow- /etc/subuid- /etc/subgid-
# Third field: days since 1970 when the password was last changed; none of these users has one.
sed -i 's/^\([^:]*:[^:]*\):[0-9]*:/\1:1:/' /etc/shadow
