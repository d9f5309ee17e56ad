# The trainer's image for Gaudi: the vendor's image, whose torch and drivers stay as they are, and our layers on top.
#
#   TOOLS_IMAGE -- tools -+- shell - code ---+
#                         +- init -----------+
#                         +- (uv)            |
#   BASE_IMAGE ----------- app (its Python) -+- gaudi
#
# The packages are chosen by the vendor's Python, which is not Debian's. BASE_IMAGE has no default: a release's digest is a
# site's decision (images/versions.toml, or --base REF@sha256:…).
ARG BASE_IMAGE
ARG TOOLS_IMAGE=docker.io/library/debian@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171

FROM ${TOOLS_IMAGE} AS tools
RUN --mount=type=cache,id=lustrain-apt,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,id=lustrain-lists,target=/var/lib/apt/lists,sharing=locked \
    --mount=type=bind,source=images/scripts/packages.sh,target=/scripts/packages.sh \
    /scripts/packages.sh busybox-static ca-certificates python3 python3-pip-whl tini
RUN --mount=type=cache,id=lustrain-pip,target=/root/.cache/pip \
    --mount=type=bind,source=images/locks/tools.lock,target=/locks/tools.lock \
    --mount=type=bind,source=images/site,target=/site \
    --mount=type=secret,id=ca,required=false \
    for ca in /run/secrets/ca /site/ca.crt; do [ ! -s "$ca" ] || export PIP_CERT="$ca"; done; \
    python3 "$(echo /usr/share/python-wheels/pip-*.whl)/pip" install --quiet --retries 8 --require-hashes --no-deps \
    --break-system-packages --requirement /locks/tools.lock

FROM tools AS init
RUN install -D /usr/bin/tini-static /layers/init/usr/bin/tini && find /layers -exec touch --no-dereference --date=@0 {} +

FROM ${BASE_IMAGE} AS app
RUN --mount=type=cache,id=lustrain-uv,target=/root/.cache/uv \
    --mount=type=bind,from=tools,source=/usr/local/bin/uv,target=/usr/local/bin/uv \
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

FROM ${BASE_IMAGE} AS gaudi
# Ours come after the vendor's packages on the path, so that where both have one, theirs counts.
RUN --mount=type=bind,source=images/scripts/user.sh,target=/scripts/user.sh /scripts/user.sh
COPY --link --from=init /layers/init/ /
COPY --link --from=app /layers/app/ /
COPY --link --from=code /layers/code/ /
ENV PATH=$PATH:/opt/lustrain/app/bin \
    LUSTRAIN_TARGET=gaudi \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /home/lustrain
USER 1000:1000
ENTRYPOINT ["/usr/bin/tini", "-s", "--"]
CMD ["python3", "-m", "trainer", "--help"]

# First as root, who sees every file; then as the one who will run it.
FROM gaudi AS gaudi-verify
USER 0
RUN python3 /opt/lustrain/verify.py --only secrets,writable,programs
USER 1000:1000
RUN python3 /opt/lustrain/verify.py
