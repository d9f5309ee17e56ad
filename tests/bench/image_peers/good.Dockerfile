# The seed guide's "good" order: system packages, requirements, then the code; one stage, and one layer of packages.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
RUN apt-get update && apt-get install -y python3 python3-pip
COPY requirements.txt /tmp/
ARG WHEELS
ARG PIP_TRUSTED_HOST
RUN --mount=type=secret,id=ca,required=false \
    [ ! -s /run/secrets/ca ] || export PIP_CERT=/run/secrets/ca; \
    pip install --break-system-packages --find-links "$WHEELS" -r /tmp/requirements.txt
COPY . /workspace
WORKDIR /workspace
CMD ["python3", "-m", "trainer", "--help"]
