"""A stack's outputs, read by the Pulumi CLI; and the Cluster that a task's flags or the environment name."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from lustrain import cluster as contract
from lustrain.cluster import Cluster
from lustrain.problem import UserError, problem

PROGRAM = Path(__file__).parents[1] / "infra"
"""The Pulumi program lies here."""
VARIABLE = "LUSTRAIN_CLUSTER"
PULUMI_WAITS_S = 120


def outputs(stack: str, needed: str, instead: str) -> dict[str, Any]:
    """Return all outputs of a stack, among which `needed` must be; `instead` is the flag that does without. UserError."""
    if shutil.which("pulumi") is None:
        raise UserError(
            f"pulumi is not on PATH; fix: install it (https://www.pulumi.com/docs/install), or give {instead}"
        )
    if not logged_in():
        raise UserError(
            f"there is no login to Pulumi's state, so the {needed} of {stack} cannot be read; fix: `pulumi login` "
            f"(or pulumi login s3://…, or --local), `pulumi up` once if that was not done yet, or give {instead}"
        )
    command = ["pulumi", "stack", "output", "--json", "--stack", stack, "--cwd", str(PROGRAM)]
    try:
        done = subprocess.run(
            [*command, "--non-interactive"],
            # The check for a newer version needs the network, and its answer is not used here.
            env={**os.environ, "PULUMI_SKIP_UPDATE_CHECK": "1"},
            capture_output=True,
            text=True,
            timeout=PULUMI_WAITS_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"pulumi did not answer within {PULUMI_WAITS_S} s; fix: try `{' '.join(command)}`") from None
    if done.returncode:
        error = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise UserError(
            f"pulumi cannot read the {needed} of {stack}: {error}; fix: `pulumi up` once, or give {instead}"
        )
    try:
        values = json.loads(done.stdout)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or needed not in values:
        raise UserError(f"stack {stack} has no output `{needed}`; fix: `pulumi up` once, or give {instead}")
    return values


def logged_in() -> bool:
    """Check whether Pulumi knows where its state is, without running it, which may need the network.

    The places are those of https://www.pulumi.com/docs/iac/cli/environment-variables/ and `pulumi login`'s own file. A file
    that cannot be read is left to Pulumi, which reports what is wrong with it.
    """
    if os.environ.get("PULUMI_BACKEND_URL") or os.environ.get("PULUMI_ACCESS_TOKEN"):
        return True
    if re.search(r"^backend:", (PROGRAM / "Pulumi.yaml").read_text(encoding="utf-8"), re.MULTILINE):
        return True
    try:
        credentials = json.loads((_credentials() / "credentials.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True
    return not isinstance(credentials, dict) or bool(credentials.get("current"))


def _credentials() -> Path:
    """Return the folder; Pulumi goes by the user's entry in passwd, and by $HOME only where there is none."""
    if named := os.environ.get("PULUMI_CREDENTIALS_PATH") or os.environ.get("PULUMI_HOME"):
        return Path(named)
    try:
        home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        home = Path.home()
    return home / ".pulumi"


def cluster(path: str | None, stack: str | None) -> Cluster | None:
    """Return that of `--cluster FILE` or `--stack NAME`, else of the file that LUSTRAIN_CLUSTER names, else None. UserError."""
    if path and stack:
        raise UserError("--cluster and --stack both name a cluster; fix: give one of them")
    if stack:
        return contract.parse(outputs(stack, "cluster", "--cluster FILE")["cluster"])
    where, file = ("--cluster", path) if path else (VARIABLE, os.environ.get(VARIABLE))
    return contract.decoded(text_of(file, where), file) if file else None


def text_of(path: str, flag: str) -> str:
    """Return the text of a file that a flag names. UserError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(problem(flag, path, error.strerror or "cannot be read")) from None
    except UnicodeDecodeError:
        raise UserError(problem(flag, path, "is not UTF-8 text")) from None
