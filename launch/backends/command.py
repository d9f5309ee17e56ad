"""Runs a scheduler's program in a clean environment: a caller's variables would change what it does."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from lustrain.problem import UNREACHABLE, UserError

KEPT = frozenset({
    "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER", "XDG_CACHE_HOME", "XDG_CONFIG_HOME",
    # The scheduler's address, and the caller's identity.
    "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "KRB5CCNAME",
    "KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT",
    # The way to it.
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_DIR", "SSL_CERT_FILE",
})  # fmt: skip
KEPT_PREFIXES = ("AWS_",)
"""kubectl logs in by `aws eks get-token`."""
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Output:
    """Exit code and output of a program."""

    code: int
    out: str
    errors: str


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of `environ` that a scheduler's program gets.

    Every SBATCH_ variable beats the script's own lines (https://slurm.schedmd.com/sbatch.html#lbAJ), and squeue's
    SQUEUE_ variables hide jobs.
    """
    return {name: value for name, value in environ.items() if name in KEPT or name.startswith(KEPT_PREFIXES)}


def run(command: Sequence[str], text: str = "", *, fix: str, output: IO[bytes] | None = None) -> Output:
    """Run a program with `text` as its input; with `output` what it prints goes into that file and is not returned.

    UserError (UNREACHABLE) with the fix where it cannot run, or does not end.
    """
    name = command[0]
    try:
        done = subprocess.run(
            command,
            input=text,
            env=environment(os.environ),
            stdout=output or subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A batch script is Python, whose source is UTF-8 in every locale.
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        raise UserError(f"{name} cannot be run: {error.strerror}; fix: {fix}", UNREACHABLE) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{name} did not answer within {TIMEOUT_S:.0f} s; fix: {fix}", UNREACHABLE) from None
    return Output(done.returncode, done.stdout or "", done.stderr)


def error_text(output: Output, marks: Sequence[str]) -> str:
    """Return the lines of standard error that hold one of these marks, as one; else its last line; else the exit code.

    Plugins, warnings and log lines may stand before and after what went wrong.
    """
    lines = [line.strip() for line in output.errors.splitlines() if line.strip()]
    marked = [line for line in lines if any(mark in line for mark in marks)]
    return "; ".join(dict.fromkeys(marked or lines[-1:])) or f"exit code {output.code}"
