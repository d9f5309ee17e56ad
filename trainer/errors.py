"""The exit codes that a launcher acts on (docs/troubleshoot.md has them), and the error of a run that a newer job took over."""

from __future__ import annotations

from lustrain.problem import DONE, FAILED, USAGE, UserError

EXIT_DONE, EXIT_FAILURE, EXIT_CONFIG = DONE, FAILED, USAGE
EXIT_PEERS = 75
"""Other ranks did not come, or one is gone: the cause is elsewhere. EX_TEMPFAIL of sysexits.h:
https://man7.org/linux/man-pages/man3/sysexits.h.3head.html"""
EXIT_REQUEUE = 85
EXIT_LOST_RUN = 86


class LostRunError(UserError):
    """A newer job owns this run; this one must stop and must not commit anything any more."""

    exit_code = EXIT_LOST_RUN
