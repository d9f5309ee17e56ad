"""Secrets are found in what goes into an image, said without being repeated, and not seen where there are none."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from lustrain.leaks import Leak, secrets_in, secrets_of

KEY = (
    ec.generate_private_key(ec.SECP256R1())
    .private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    .decode()
)
# Put together here, so that scanners of repositories do not take this file for a leak.
AWS, GITHUB, FACE = "AKIA" + "Q3EGVHJ2KXNAB7YT", "ghp" + "_" + "a1B2" * 9, "hf" + "_" + "aB3d" * 8 + "xY"


def found(path: str, data: bytes) -> list[Leak]:
    return secrets_in([("before", b"x"), (path, data)])


@pytest.mark.parametrize(
    ("path", "text", "what"),
    [
        ("opt/key.pem", KEY, "a private key"),
        ("opt/sa.json", '{"private_key": "' + KEY.replace("\n", "\\n") + '"}', "a private key"),
        ("etc/app.ini", f"id = {AWS}", "an AWS access key"),
        ("etc/app.ini", f"id={AWS}\n", "an AWS access key"),
        ("home/x/.bash_history", f"git clone https://x:{GITHUB}@github.com/y", "a GitHub token"),
        ("root/.cache/huggingface/token", FACE, "a Hugging Face token"),
        ("root/.docker/config.json", '{"auths": {"r": {"auth": "bWU6cHc="}}}', "a registry's credentials"),
        ("etc/pip.conf", "[global]\nindex-url = https://me:pw@host/simple", "a package index's credentials"),
        ("root/.config/uv/uv.toml", 'index-url = "https://me:pw@host/simple"', "a package index's credentials"),
        ("root/.aws/config", "aws_secret_access_key = x", "AWS credentials"),
        ("root/.netrc", "machine h login me password x", "passwords of hosts"),
        ("root/.pypirc", "[x]\nusername = me\npassword = pw", "a package index's credentials"),
        ("root/.git-credentials", "https://me:pw@host", "git's credentials"),
        ("etc/ssh/ssh_host_rsa_key", "x", "a host's private key"),
    ],
)
def test_a_secret_in_a_file_is_found_and_not_repeated(path: str, text: str, what: str) -> None:
    leaks = found(path, text.encode())
    assert leaks == [Leak(path, what)]
    assert text not in str(leaks)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("usr/lib/python3/ssh.py", 'BEGIN = "-----BEGIN OPENSSH PRIVATE KEY-----"\nEND = 1'),
        ("botocore/examples.json", '"AccessKeyId": "AKIAIOSFODNN7EXAMPLE"'),
        ("usr/lib/libtorch.so", f"x{AWS}y"),
        ("root/.docker/config.json", '{"auths": {}, "credHelpers": {"r": "ecr-login"}}'),
        ("etc/pip.conf", "[global]\nindex-url = https://host/simple"),
        ("usr/a.py", "hf_transformers_modeling_flash_attention"),
    ],
)
def test_what_only_looks_like_a_secret_is_none(path: str, text: str) -> None:
    assert found(path, text.encode()) == []


@pytest.mark.parametrize(
    "line",
    [
        "RUN --mount=type=secret,id=ca,required=false pip install --require-hashes",
        "ENV TOKENIZERS_PARALLELISM=false",
        "ARG SECRET_FILE=/run/secrets/netrc",
        "ENV MAX_TOKEN=131072000",
        "RUN curl -u $USER:$PASSWORD https://$USER:$PASSWORD@host/",
        "RUN PASSWORD=$(cat /run/secrets/pw) x",
        "ADD https://example.com/a.tar.gz /",
    ],
)
def test_commands_that_handle_secrets_well_are_no_findings(line: str) -> None:
    assert secrets_of({"history": [{"created_by": line}], "config": {"Env": ["PATH=/bin"], "Labels": None}}) == []


@pytest.mark.parametrize(
    "line",
    [
        "|2 GIT_TOKEN=abcdefgh1234 X=1 /bin/sh -c make",
        'ENV API_KEY="abc def ghi"',
        "ENV db.password=abcdefgh",
        f"RUN aws configure set x {AWS}",
        "RUN git clone https://me:pw@host/x",
    ],
)
def test_a_secret_in_a_command_is_found_and_not_repeated(line: str) -> None:
    (leak,) = secrets_of({"history": [{"created_by": "x"}, {"created_by": line}]})
    assert leak.where == "history 2"
    assert not any(part in str(leak) for part in (AWS, "abcdefgh", "me:pw"))
