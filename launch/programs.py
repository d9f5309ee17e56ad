"""Programs of a scheduler, asked without what the caller's environment would have them do instead."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lustrain.problem import UNREACHABLE, UserError

KEPT = frozenset({
    "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER", "XDG_CACHE_HOME", "XDG_CONFIG_HOME",
    # Where the scheduler is, and who asks.
    "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "KRB5CCNAME",
    "KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT",
    # The way there.
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_DIR", "SSL_CERT_FILE",
})  # fmt: skip
KEPT_BEGINNINGS = ("AWS_",)
"""kubectl has `aws eks get-token` log in."""
ANSWER_S = 60.0


@dataclass(frozen=True)
class Said:
    """What a program printed, and its exit code."""

    code: int
    out: str
    errors: str


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a scheduler's programs get of `environ`.

    Of sbatch every SBATCH_ variable beats the script's own lines (https://slurm.schedmd.com/sbatch.html#lbAJ), and squeue's
    SQUEUE_ variables hide jobs.
    """
    return {name: value for name, value in environ.items() if name in KEPT or name.startswith(KEPT_BEGINNINGS)}


def ask(command: Sequence[str], text: str = "", *, fix: str) -> Said:
    """Run a program that is on PATH to its end. UserError (UNREACHABLE) with the fix where it is not, or does not answer."""
    name = command[0]
    try:
        done = subprocess.run(
            command,
            input=text,
            env=environment(os.environ),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_S,
            check=False,
        )
    except OSError as error:
        raise UserError(f"{name} cannot be run: {error.strerror}; fix: {fix}", UNREACHABLE) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{name} did not answer within {ANSWER_S:.0f} s; fix: {fix}", UNREACHABLE) from None
    return Said(done.returncode, done.stdout, done.stderr)


def complaint(said: Said, marks: Sequence[str]) -> str:
    """Return the lines of standard error that hold one of these marks, as one; else its last line; else the exit code.

    Plugins, warnings and log lines may stand before and after what went wrong.
    """
    lines = [line.strip() for line in said.errors.splitlines() if line.strip()]
    telling = [line for line in lines if any(mark in line for mark in marks)]
    return "; ".join(dict.fromkeys(telling or lines[-1:])) or f"exit code {said.code}"
