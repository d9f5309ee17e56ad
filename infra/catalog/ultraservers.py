"""Instance types that come only as part of an UltraServer, and how many instances one has."""

from __future__ import annotations

from collections.abc import Mapping

SOURCE = "https://docs.aws.amazon.com/eks/latest/userguide/ml-eks-nvidia-ultraserver.html"
ULTRASERVER_BLOCKS = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-how.html"
"""Each UltraServer is a capacity block of its own, whatever number of them one request asks for."""
ULTRASERVER_SIZES: Mapping[str, tuple[int, ...]] = {"p6e-gb200.36xlarge": (9, 18)}
"""Of u-p6e-gb200x36 and u-p6e-gb200x72 (SOURCE, read in November 2026). A trn2u.48xlarge is one of four of a Trn2 UltraServer;
nothing that was read says that it comes in no other way. What trn3 and p6e-gb300 come as is not known here."""
