# The seed guide's "bad" order: the code goes in first, so that any change of it installs every package again.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
# The guide's base brings Python, ours does not: it stands above the code, so that a change does not pay for it.
RUN apt-get update && apt-get install -y python3 python3-pip
COPY . /workspace
WORKDIR /workspace
ARG WHEELS
ARG PIP_TRUSTED_HOST
RUN --mount=type=secret,id=ca,required=false \
    [ ! -s /run/secrets/ca ] || export PIP_CERT=/run/secrets/ca; \
    pip install --break-system-packages --find-links "$WHEELS" -r requirements.txt
CMD ["python3", "-m", "trainer", "--help"]
