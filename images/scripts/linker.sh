#!/bin/sh
# Writes the dynamic linker's configuration and cache for a torch layer that lies on the system only in the finished image:
# linker.sh INTO, with that layer's nvidia/ mounted where it will be.
#
# Then torch, the EFA plugin and nccl-tests find one NCCL and one cudart: those of the wheels.
set -eu
into=$1
mkdir -p "$into/etc/ld.so.conf.d"
for library in libcudart.so libnccl.so.2; do
    file=$(find /opt/lustrain/torch/nvidia -name "$library" | head -n 1)
    [ -n "$file" ] || { echo "linker: the wheels of the torch lock hold no $library" >&2 && exit 1; }
    dirname "$file"
done | sort -u >/etc/ld.so.conf.d/lustrain-nvidia.conf
cp /etc/ld.so.conf.d/lustrain-nvidia.conf "$into/etc/ld.so.conf.d/"
ldconfig -C "$into/etc/ld.so.cache"
find "$into" -exec touch --no-dereference --date=@0 {} +
