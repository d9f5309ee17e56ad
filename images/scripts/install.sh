#!/bin/sh
# Unpacks a hashed lock below /layers: install.sh LAYER LOCK [FIND_LINKS]. Runs in a build stage that ships nothing else.
#
# A layer's tree starts at its root and every time stamp in it is the same, so that unpacking it again gives the same layer.
# Of torch, the parts of some hundred MB move to trees of their own (/layers/nvidia, /layers/triton, /layers/lib), which nodes pull at once;
# they meet again in one folder, where torch looks for them relative to itself.
set -eu
layer=$1 lock=$2 find_links=${3:-}
home=/opt/lustrain/$layer
into=/layers/$layer$home

pins=$(grep -o '^[A-Za-z0-9._-]*==[^ ;]*' "$lock")
# What a vendor's base brings and its accelerator needs is never installed over.
if [ "$layer" = app ] && printf '%s\n' "$pins" | grep -iE '^(torch|habana|triton|nvidia|intel)'; then
    echo "$lock: packages of an accelerator; the layer app goes on top of any torch; take them out of what pyproject.toml depends on" >&2
    exit 2
fi

# What a site brings of its own: a CA for its proxy, credentials of its index, wheels. None of it stays in a layer.
for ca in /run/secrets/ca /site/ca.crt; do
    [ ! -s "$ca" ] || export SSL_CERT_FILE="$ca"
done
[ ! -s /run/secrets/netrc ] || export NETRC=/run/secrets/netrc
# Of the wheels those that the lock means: torch's for CPUs would satisfy the version that the lock for CUDA pins, too.
wheels=$(mktemp -d)
for wheel in /site/wheels/*.whl; do
    [ ! -e "$wheel" ] || ! grep -q "sha256:$(sha256sum "$wheel" | cut -c 1-64)" "$lock" || ln -s "$wheel" "$wheels/"
done
set -- --find-links "$wheels"
[ -z "$find_links" ] || set -- "$@" --find-links "$find_links"

# A build of minutes does not end because an index was away for some seconds.
export UV_HTTP_RETRIES=8 UV_HTTP_TIMEOUT=120
# The lock is complete (--no-deps), checked (--require-hashes) and never compiles (--only-binary).
case $layer in
# Gigabytes are written once, beside where they will lie: what rarely changes gains nothing from a cache, which is another disk.
torch) set -- --cache-dir /layers/.uv --link-mode hardlink "$@" ;;
*) set -- --link-mode copy "$@" ;;
esac
uv pip install --quiet --python "$(command -v python3)" --target "$into" --no-deps --require-hashes \
    --only-binary :all: "$@" --requirement "$lock"
rm -rf /layers/.uv

# 130 MB that no training run opens: torch's own tests and the compiler of protocol buffers.
rm -rf "$into/torch/test" "$into/torch/bin/"protoc* "$into/torch/bin/test_"* "$into"/.lock
# Nine of ten files of torch are C++ headers; without CUDA the image has no compiler to read them.
[ -d "$into/nvidia" ] || rm -rf "$into/torch/include"
# uv notes when a wheel from a folder was written there, which a second checkout has otherwise.
find "$into" -path '*.dist-info/uv_cache.json' -delete
find "$into" -path '*.dist-info/RECORD' -exec sed -i '/\.dist-info\/uv_cache\.json,/d' {} +

# What images.verify compares with.
mkdir -p "/layers/$layer/opt/lustrain/locks"
printf '%s\n' "$pins" >"/layers/$layer/opt/lustrain/locks/$layer.txt"

if [ "$layer" = torch ]; then
    # The EFA plugin opens libcudart.so by this name, of which the wheel has the numbered one only.
    for cudart in "$into"/nvidia/cu*/lib/libcudart.so.*; do
        [ ! -e "$cudart" ] || ln -sfn "${cudart##*/}" "${cudart%.so.*}.so"
    done
    python3 /scripts/bytecode.py "$into"
    for part in nvidia triton torch/lib; do
        [ -d "$into/$part" ] || continue
        to=/layers/${part##*/}$home/$part
        mkdir -p "${to%/*}"
        mv "$into/$part" "$to"
    done
    mkdir -p "/layers/rest$home"
    find "$into" -mindepth 1 -maxdepth 1 ! -name torch -exec mv -t "/layers/rest$home" {} +
    mv "/layers/torch/opt/lustrain/locks" /layers/rest/opt/lustrain/locks
fi
find /layers -exec touch --no-dereference --date=@0 {} +
