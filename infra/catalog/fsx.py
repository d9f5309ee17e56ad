"""What FSx takes: sizes, rates, ports and numbers of Lustre and OpenZFS file systems.

Capacities are in GiB as FSx counts them: a "2.4-TiB file system" is one of 2400 GiB, and 50 MB/s/TiB on it make 120 MB/s
(https://docs.aws.amazon.com/fsx/latest/APIReference/API_CreateFileSystemLustreConfiguration.html, PerUnitStorageThroughput).

Plan, preflight and price go by these numbers, and nothing that runs here could contradict them: the embedded AWS takes any.
tests/infra/test_catalog.py holds them against AWS's text.
"""

from __future__ import annotations

LUSTRE_GUIDE = "https://docs.aws.amazon.com/fsx/latest/LustreGuide"
API = "https://docs.aws.amazon.com/fsx/latest/APIReference"

GIB_PER_TIB = 1000
"""As FSx counts, see above."""
PER_TIB_MB_S = (125, 250, 500, 1000)
"""Throughput that PERSISTENT_2 on SSD can have (CreateFileSystemLustreConfiguration, PerUnitStorageThroughput)."""
SMALLEST_GIB = 1200
STEP_GIB = 2400
"""SSD has 1200 GiB or a multiple of 2400 (API_CreateFileSystem.html, StorageCapacity)."""
EFA_STEP_GIB = {125: 38_400, 250: 19_200, 500: 9_600, 1000: 4_800}
"""An EFA-enabled file system has a multiple of this (LustreGuide/increase-storage-capacity.html)."""
EFA_SMALLEST_MB_S = 4_800
"""What one such step makes, at each of the four rates."""
METADATA_IOPS = (1_500, 3_000, 6_000, *range(12_000, 192_001, 12_000))
"""On SSD (API_CreateFileSystemLustreMetadataConfiguration.html)."""


def automatic_iops(capacity_gib: int) -> int:
    """Metadata IOPS that SSD of this capacity has by itself, and fewer than which FSx refuses.

    LustreGuide/managing-metadata-performance.html; the refusal: https://github.com/hashicorp/terraform-provider-aws/issues/44432
    """
    for most, iops in ((1_200, 1_500), (2_400, 3_000), (9_600, 6_000), (45_600, 12_000)):
        if capacity_gib <= most:
            return iops
    return min(192_000, 12_000 * (capacity_gib // 24_000))


TIERED_METADATA_IOPS = (6_000, 12_000)
"""On Intelligent-Tiering, which has no AUTOMATIC (same page)."""
TIERED_STEP_MB_S = 4_000
TIERED_LARGEST_MB_S = 2_000_000
"""Throughput of Intelligent-Tiering (LustreGuide/managing-throughput-capacity.html)."""
CACHE_GIB = (32, 131_072)
"""Least and most read cache for every 4000 MB/s (API_LustreReadCacheConfiguration.html)."""
VERSION = "2.15"
"""EFA and a metadata configuration need it (LustreGuide/efa-file-systems.html)."""
MOST_ASSOCIATIONS = 8
"""Of one file system (API_CreateDataRepositoryAssociation.html)."""
EFA_CONNECTIONS = 1024
"""EFA interfaces of all clients that one file system takes (LustreGuide/configure-efa-clients.html)."""
LUSTRE_PORTS = ((988, 988), (1018, 1023))
"""LNET, both ways between servers and clients (LustreGuide/limit-access-security-groups.html)."""
NFS_PORTS = ((111, 111), (2049, 2049), (20001, 20003))
"""Port mapper, NFS, mount, status and lock daemons
(https://docs.aws.amazon.com/fsx/latest/OpenZFSGuide/limit-access-security-groups.html)."""
HOME_MB_S = (160, 320, 640, 1_280, 2_560, 3_840, 5_120, 7_680, 10_240)
"""Throughput of OpenZFS's second generation in one zone (API_CreateFileSystemOpenZFSConfiguration.html)."""
