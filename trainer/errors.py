"""The exit codes that a launcher acts on (docs/troubleshoot.md has them), and the error of a run that a newer job took over."""

from __future__ import annotations

from collections.abc import Sequence

from lustrain.problem import DONE, FAILED, USAGE, UserError

EXIT_DONE, EXIT_FAILURE, EXIT_CONFIG = DONE, FAILED, USAGE
EXIT_PEERS = 75
"""Other ranks did not come, or one is gone: the cause is elsewhere. EX_TEMPFAIL of sysexits.h:
https://man7.org/linux/man-pages/man3/sysexits.h.3head.html"""
EXIT_REQUEUE = 85
EXIT_LOST_RUN = 86


def job_exit_code(codes: Sequence[int]) -> int:
    """Return the job's exit code: what all ranks agree on, else the one that says most; death by a signal counts as 1.

    A rank that ends with EXIT_PEERS names no cause, so any other failure goes before it.
    """
    if set(codes) <= {EXIT_DONE}:
        return EXIT_DONE
    if set(codes) <= {EXIT_DONE, EXIT_REQUEUE}:
        return EXIT_REQUEUE
    for code in (EXIT_LOST_RUN, EXIT_CONFIG):
        if code in codes:
            return code
    causes = [code for code in codes if code not in (EXIT_DONE, EXIT_REQUEUE, EXIT_PEERS)]
    if not causes:
        return EXIT_PEERS
    return next((code for code in causes if code > 0), EXIT_FAILURE)


class LostRunError(UserError):
    """A newer job owns this run; this one must stop and must not commit anything any more."""

    exit_code = EXIT_LOST_RUN
