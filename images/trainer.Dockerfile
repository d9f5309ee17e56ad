# The trainer's image: targets cpu and cuda, each with <target>-verify, which checks it and ships nothing.
#
#   TOOLS_IMAGE -- tools -+- torch-cpu ---- lib, torch, rest -----------------------+
#                         +- torch-cuda --- nvidia, lib, torch, triton, rest ---+  |
#                         +- app ---------- app --------------------------------+--+
#                         +- shell - code - code -------------------------------+--+
#                                                                               |  |
#   BASE_IMAGE --- system -+- system-cuda -+- linker (ld.so.cache) -------------+  |
#                          |               +- cuda-layers, cuda ----------------+  |
#                          +- cpu-layers, cpu -------------------------------------+
#
# Layers lie below /opt/lustrain, each in a folder of its own and copied with --link: changing one leaves the others' digests,
# also the base's. Every number here is a default of versions.toml, and tested against it. No `# syntax=` line, which would
# have to be pulled.
ARG BASE_IMAGE=docker.io/library/debian@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171
ARG TOOLS_IMAGE=docker.io/library/debian@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171

# Mounts of its own, so that it does not wait for the system.
FROM ${TOOLS_IMAGE} AS tools
RUN --mount=type=cache,id=lustrain-tools-apt,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,id=lustrain-tools-lists,target=/var/lib/apt/lists,sharing=locked \
    --mount=type=bind,source=images/scripts/packages.sh,target=/scripts/packages.sh \
    /scripts/packages.sh busybox-static ca-certificates python3 python3-pip-whl
RUN --mount=type=cache,id=lustrain-pip,target=/root/.cache/pip \
    --mount=type=bind,source=images/locks/tools.lock,target=/locks/tools.lock \
    --mount=type=bind,source=images/site,target=/site \
    --mount=type=secret,id=ca,required=false \
    for ca in /run/secrets/ca /site/ca.crt; do [ ! -s "$ca" ] || export PIP_CERT="$ca"; done; \
    python3 "$(echo /usr/share/python-wheels/pip-*.whl)/pip" install --quiet --retries 8 --require-hashes --no-deps \
    --break-system-packages --requirement /locks/tools.lock

FROM tools AS torch-cpu
ARG TORCH_CPU_LINKS=https://download.pytorch.org/whl/cpu/torch/
RUN --mount=type=bind,source=images/locks/torch-cpu.lock,target=/locks/torch.lock \
    --mount=type=bind,source=images/scripts/install.sh,target=/scripts/install.sh \
    --mount=type=bind,source=images/scripts/bytecode.py,target=/scripts/bytecode.py \
    --mount=type=bind,source=images/site,target=/site \
    --mount=type=secret,id=ca,required=false \
    --mount=type=secret,id=netrc,required=false \
    /scripts/install.sh torch /locks/torch.lock "$TORCH_CPU_LINKS"

FROM tools AS torch-cuda
RUN --mount=type=bind,source=images/locks/torch-cuda.lock,target=/locks/torch.lock \
    --mount=type=bind,source=images/scripts/install.sh,target=/scripts/install.sh \
    --mount=type=bind,source=images/scripts/bytecode.py,target=/scripts/bytecode.py \
    --mount=type=bind,source=images/site,target=/site \
    --mount=type=secret,id=ca,required=false \
    --mount=type=secret,id=netrc,required=false \
    /scripts/install.sh torch /locks/torch.lock

FROM tools AS app
RUN --mount=type=cache,id=lustrain-uv,target=/root/.cache/uv \
    --mount=type=bind,source=images/locks/app.lock,target=/locks/app.lock \
    --mount=type=bind,source=images/scripts/install.sh,target=/scripts/install.sh \
    --mount=type=bind,source=images/site,target=/site \
    --mount=type=secret,id=ca,required=false \
    --mount=type=secret,id=netrc,required=false \
    /scripts/install.sh app /locks/app.lock

# What code is settled with: for an edit, a builder that lost its cache fetches a megabyte, and neither tools nor base.
FROM tools AS shell
RUN install -D /bin/busybox /layers/shell/bin/busybox && \
    for name in chmod find sh touch; do ln -s busybox "/layers/shell/bin/$name"; done

FROM scratch AS code
COPY --from=shell /layers/shell/ /
COPY lustrain /layers/code/opt/lustrain/code/lustrain
COPY trainer /layers/code/opt/lustrain/code/trainer
COPY images/verify.py /layers/code/opt/lustrain/verify.py
RUN chmod -R u=rwX,go=rX /layers/code && chmod 0755 /layers/code/opt/lustrain/verify.py && \
    find /layers/code -exec touch -h -d @0 {} +

FROM ${BASE_IMAGE} AS system
RUN --mount=type=cache,id=lustrain-apt,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,id=lustrain-lists,target=/var/lib/apt/lists,sharing=locked \
    --mount=type=bind,source=images/scripts/packages.sh,target=/scripts/packages.sh \
    --mount=type=bind,source=images/scripts/user.sh,target=/scripts/user.sh \
    --mount=type=bind,source=images/scripts/settle.sh,target=/scripts/settle.sh \
    /scripts/packages.sh ca-certificates python3 tini && /scripts/user.sh && /scripts/settle.sh
ENV PATH=/opt/lustrain/torch/bin:/opt/lustrain/app/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    USER=lustrain \
    TRITON_CACHE_DIR=/tmp/triton \
    TORCHINDUCTOR_CACHE_DIR=/tmp/inductor
WORKDIR /home/lustrain
# -s, because in a pod that shares its process namespace tini is not process 1.
ENTRYPOINT ["/usr/bin/tini", "-s", "--"]
CMD ["python3", "-m", "trainer", "--help"]

FROM system AS system-cuda
# Empty EFA_VERSION: without EFA. A site's copy of the installer: EFA_URL=/site/aws-efa-installer-….tar.gz
ARG EFA_VERSION=1.49.0
ARG EFA_SHA256=cf2e9281a2328a243c76f911a490faed43ca0fecfe4733c25e34b2e92a32c309
ARG EFA_URL=https://efa-installer.amazonaws.com/aws-efa-installer-1.49.0.tar.gz
# Triton compiles its launchers when they run, against Python's headers.
RUN --mount=type=cache,id=lustrain-apt,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,id=lustrain-lists,target=/var/lib/apt/lists,sharing=locked \
    --mount=type=bind,source=images/scripts/packages.sh,target=/scripts/packages.sh \
    --mount=type=bind,source=images/scripts/install_efa.sh,target=/scripts/install_efa.sh \
    --mount=type=bind,source=images/scripts/fetch.py,target=/scripts/fetch.py \
    --mount=type=bind,source=images/site,target=/site \
    --mount=type=secret,id=ca,required=false \
    --mount=type=bind,source=images/scripts/settle.sh,target=/scripts/settle.sh \
    /scripts/packages.sh gcc libc6-dev python3-dev && /scripts/settle.sh

# Apart, so that it does not make the system's layer depend on torch's lock.
FROM system-cuda AS linker
RUN --mount=type=bind,from=torch-cuda,source=/layers/nvidia/opt/lustrain/torch/nvidia,target=/opt/lustrain/torch/nvidia \
    --mount=type=bind,source=images/scripts/linker.sh,target=/scripts/linker.sh \
    /scripts/linker.sh /layers/linker

FROM system AS cpu-layers
COPY --link --from=torch-cpu /layers/rest/ /
COPY --link --from=torch-cpu /layers/lib/ /
COPY --link --from=torch-cpu /layers/torch/ /
COPY --link --from=app /layers/app/ /
ENV LUSTRAIN_TARGET=cpu

FROM cpu-layers AS cpu
COPY --link --from=code /layers/code/ /
USER 1000:1000

FROM system-cuda AS cuda-layers
COPY --link --from=torch-cuda /layers/nvidia/ /
COPY --link --from=torch-cuda /layers/lib/ /
COPY --link --from=torch-cuda /layers/torch/ /
COPY --link --from=torch-cuda /layers/triton/ /
COPY --link --from=torch-cuda /layers/rest/ /
COPY --link --from=linker /layers/linker/ /
COPY --link --from=app /layers/app/ /
# What nvidia/cuda would set: without it the runtime's hook gives a container no GPU.
ENV LUSTRAIN_TARGET=cuda \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM cuda-layers AS cuda
COPY --link --from=code /layers/code/ /
USER 1000:1000

# All that lies below the code, checked apart: an edit of the code does not walk through gigabytes again.
FROM cpu-layers AS cpu-layers-verify
ARG BUDGET_MB=
RUN --mount=type=bind,source=images/verify.py,target=/verify.py \
    --mount=type=bind,source=lustrain/leaks.py,target=/lustrain/leaks.py \
    python3 /verify.py --only versions,one-nccl,plugin,secrets,writable,programs,size --budget-mb "$BUDGET_MB"

FROM cuda-layers AS cuda-layers-verify
ARG BUDGET_MB=
ARG EFA_VERSION=1.49.0
RUN --mount=type=bind,source=images/verify.py,target=/verify.py \
    --mount=type=bind,source=lustrain/leaks.py,target=/lustrain/leaks.py \
    python3 /verify.py --only versions,one-nccl,plugin,secrets,writable,programs,size \
    --budget-mb "$BUDGET_MB" --efa "$EFA_VERSION"

# As the one who will run it. The mount is only there so that the other check is a part of this one.
FROM cpu AS cpu-verify
RUN --mount=type=bind,from=cpu-layers-verify,source=/etc,target=/mnt \
    /opt/lustrain/verify.py --only imports,only-trainer,user

FROM cuda AS cuda-verify
RUN --mount=type=bind,from=cuda-layers-verify,source=/etc,target=/mnt \
    /opt/lustrain/verify.py --only imports,only-trainer,user
