#!/bin/sh
# Gives one time to all that is newer than /tmp/began, so that the same packages make the same layer on every builder: settle.sh
set -eu
# Mounts are not part of the layer, and most of them cannot be written to.
find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /run -o -path /scripts -o -path /site -o -path /etc/hosts \
    -o -path /etc/resolv.conf \) -prune -o -newer /tmp/began -exec touch --no-dereference --date=@0 {} +
rm -f /tmp/began
touch --date=@0 /tmp
