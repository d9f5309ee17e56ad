# The textbook's two stages: packages and code come to lie in one folder of a build stage, and one COPY takes it over, as in
# https://github.com/astral-sh/uv-docker-example/blob/main/multistage.Dockerfile; with pip as in the seed guide.
ARG BASE_IMAGE
FROM ${BASE_IMAGE} AS builder
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv
WORKDIR /app
RUN python3 -m venv .venv
COPY requirements.txt .
ARG WHEELS
ARG PIP_TRUSTED_HOST
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=ca,required=false \
    [ ! -s /run/secrets/ca ] || export PIP_CERT=/run/secrets/ca; \
    .venv/bin/pip install --find-links "$WHEELS" -r requirements.txt
COPY . .

FROM ${BASE_IMAGE}
RUN apt-get update && apt-get install -y --no-install-recommends python3
COPY --from=builder /app /app
WORKDIR /app
ENV PATH=/app/.venv/bin:$PATH
CMD ["python3", "-m", "trainer", "--help"]
