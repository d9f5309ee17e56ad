"""Kubernetes versions of EKS, with the days on which AWS's support of each ends, and whether HyperPod takes them.

Renew the table by hand from `aws eks describe-cluster-versions --include-all` and the two pages; say what they leave open.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta

CALENDAR = "https://docs.aws.amazon.com/eks/latest/userguide/kubernetes-versions.html"
HYPERPOD = "https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-prerequisites.html"
DATE = "2026-09-29"
"""When CALENDAR was last read for this table, by others: 1.29 to 1.34 are from AWS's own source of the page, 1.28, 1.35 and
1.36 from what endoflife.date and dated notes of others quote from it. HYPERPOD was read in 2026, after 1.35 came (2026-01-28).

Unconfirmed: whether EKS has 1.37 by now (Kubernetes released it on 2026-08-26; nothing that was read names it), and whether
HyperPod takes 1.36, which EKS has since 2026-06-02: its page ends at 1.35. `fab preflight --online` asks EKS; nothing but
CreateCluster asks HyperPod."""
NOTICE = timedelta(days=90)
"""How long before an end we speak of it; our own line. AWS announces an end 60 days before (CALENDAR)."""


@dataclass(frozen=True)
class Version:
    """A minor version. From the beginning of `standard_ends` (UTC) on, extended support is billed, and a control plane with
    the policy STANDARD is upgraded. From `extended_ends` on, EKS makes none of it, and upgrades those that there are
    (CALENDAR). `hyperpod`: HYPERPOD names it."""

    name: str
    standard_ends: date
    extended_ends: date
    hyperpod: bool = True


VERSIONS = {
    entry.name: entry
    for entry in (
        Version("1.28", date(2024, 11, 26), date(2025, 11, 26), hyperpod=False),
        Version("1.29", date(2025, 3, 23), date(2026, 3, 23), hyperpod=False),
        Version("1.30", date(2025, 7, 23), date(2026, 7, 23)),
        Version("1.31", date(2025, 11, 26), date(2026, 11, 26)),
        Version("1.32", date(2026, 3, 23), date(2027, 3, 23)),
        Version("1.33", date(2026, 7, 29), date(2027, 7, 29)),
        Version("1.34", date(2026, 12, 2), date(2027, 12, 2)),
        Version("1.35", date(2027, 3, 27), date(2028, 3, 27)),
        Version("1.36", date(2027, 8, 2), date(2028, 8, 2), hyperpod=False),
    )
}
"""Oldest first."""
NEWEST = [item.name for item in VERSIONS.values() if item.hyperpod][-1]
"""The newest that both EKS and HyperPod are known to take."""


def newer_than(name: str, today: date) -> str | None:
    """Return the newest known after `name` that HyperPod takes, and that is in standard support on `today`."""
    later = list(VERSIONS)[list(VERSIONS).index(name) + 1 :]
    newer = [item for item in later if VERSIONS[item].hyperpod and today < VERSIONS[item].standard_ends]
    return newer[-1] if newer else None
