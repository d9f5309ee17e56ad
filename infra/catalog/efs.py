"""What EFS takes, and how AWS says to mount it."""

from __future__ import annotations

GUIDE = "https://docs.aws.amazon.com/efs/latest/ug"
EFS_PORT = 2049
"""NFS over TCP, all that a mount target answers (GUIDE/network-access.html)."""
MOUNT_OPTIONS = "nfsvers=4.1,rsize=1048576,wsize=1048576,hard,timeo=600,retrans=2,noresvport,noatime,_netdev"
"""The line of GUIDE/nfs-automount-efs.html, and noatime; `nconnect` is not in it."""
