"""Write a snapshot anew: `python -m infra.catalog.refresh FILE… --source TEXT --date DAY`.

Each file is what `aws ec2 describe-instance-types --output json` prints, for the types: they differ by region, so take one that
has those you train on. Or, for the offerings, what `aws ec2 describe-instance-type-offerings --location-type
availability-zone-id --region …` prints: ask every region that you use, one without a file is unknown afterwards.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from infra.catalog import refresh_offerings
from infra.catalog.instances import SNAPSHOT
from infra.catalog.offerings import OFFERINGS

WITHOUT_LIST = ("interface",)
"""Cards of records that name no interface types take ordinary interfaces; EFA is then what EfaInfo allows on top."""


def summary(record: dict[str, Any]) -> dict[str, Any]:
    """Return the part of one DescribeInstanceTypes record that plans need, cards run-length encoded in the order of their
    index."""
    network = record["NetworkInfo"]
    efa = (network.get("EfaInfo") or {}).get("MaximumEfaInterfaces", 0)
    disks = (record.get("InstanceStorageInfo") or {}).get("Disks", [])
    return {
        "type": record["InstanceType"],
        "arch": next(iter(record["ProcessorInfo"]["SupportedArchitectures"][-1:]), ""),
        "vcpus": record["VCpuInfo"]["DefaultVCpus"],
        "threads": record["VCpuInfo"].get("DefaultThreadsPerCore", 1),
        "mib": record["MemoryInfo"]["SizeInMiB"],
        "accelerators": list(_accelerators(record)),
        "nvme": [sum(disk["Count"] for disk in disks), sum(disk["Count"] * disk["SizeInGB"] for disk in disks)],
        "usage": sorted(record["SupportedUsageClasses"]),
        "placement": sorted(record["PlacementGroupInfo"]["SupportedStrategies"]),
        "efa": efa,
        "primary": network.get("DefaultNetworkCardIndex", 0),
        "gbit": _sustained_gbit(network),
        "cards": _cards(network, efa),
    }


def _accelerators(record: dict[str, Any]) -> Iterable[list[Any]]:
    for gpu in (record.get("GpuInfo") or {}).get("Gpus", []):
        yield ["gpu", f"{gpu['Manufacturer']} {gpu['Name']}", gpu["Count"], gpu["MemoryInfo"]["SizeInMiB"]]
    for device in (record.get("NeuronInfo") or {}).get("NeuronDevices", []):
        yield ["neuron", device["Name"], device["Count"], device["MemoryInfo"]["SizeInMiB"]]


def _cards(network: dict[str, Any], efa: int) -> list[list[Any]]:
    cards = sorted(network["NetworkCards"], key=lambda card: card["NetworkCardIndex"])
    if [card["NetworkCardIndex"] for card in cards] != list(range(len(cards))):
        raise ValueError(f"network cards are not numbered from 0: {cards}")
    without = (*WITHOUT_LIST, "efa") if efa else WITHOUT_LIST
    shapes = [
        (card["MaximumNetworkInterfaces"], tuple(sorted(card.get("InterfaceTypes") or without))) for card in cards
    ]
    return [[len(list(run)), slots, list(kinds)] for (slots, kinds), run in groupby(shapes)]


def _sustained_gbit(network: dict[str, Any]) -> float:
    """Return what all cards carry together without end, in Gbit/s; 0 where AWS gives words, like `Moderate`.

    The figure is NetworkPerformance's, since cards may be able to carry more together than the instance. `Up to` is a burst;
    the first card's baseline holds without end (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-network-bandwidth.html).
    """
    text = network["NetworkPerformance"]
    if text.startswith("Up to"):
        return float(network["NetworkCards"][0].get("BaselineBandwidthInGbps", 0))
    found = re.fullmatch(r"(?:(\d+)x )?([\d.]+) Gigabit", text)
    return int(found[1] or 1) * float(found[2]) if found else 0.0


def render(records: Iterable[dict[str, Any]], source: str, date: str) -> str:
    """Return the whole snapshot as text, sorted by name, one type a line."""
    lines = sorted((summary(record) for record in records), key=lambda line: str(line["type"]))
    return "".join(
        json.dumps(line, separators=(",", ":")) + "\n" for line in ({"source": source, "date": date}, *lines)
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m infra.catalog.refresh", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="answers of AWS, all of one kind")
    parser.add_argument("--source", required=True, help="where the answers came from, for the first line")
    parser.add_argument("--date", required=True, help="when, as YYYY-MM-DD")
    args = parser.parse_args(argv)
    answers = [json.loads(file.read_text(encoding="utf-8")) for file in args.files]
    offerings = "InstanceTypeOfferings" in answers[0]
    records = [
        record for answer in answers for record in answer["InstanceTypeOfferings" if offerings else "InstanceTypes"]
    ]
    snapshot, write = (OFFERINGS, refresh_offerings.render) if offerings else (SNAPSHOT, render)
    snapshot.write_text(write(records, args.source, args.date), encoding="utf-8")
    print(f"{snapshot}: {len(records)} records of {len(answers)} files")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
