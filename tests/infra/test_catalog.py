"""The dated lists of what AWS offers where and until when: they are what their sources say, and they agree with each other."""

from __future__ import annotations

import gzip
import json
import re
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import moto
import pytest
from botocore.loaders import Loader

import node_setup
from infra.catalog import fsx, refresh
from infra.catalog.botocore_data import regions
from infra.catalog.instances import SNAPSHOT, Accelerator, instance, snapshot
from infra.catalog.kubernetes import NEWEST, VERSIONS
from infra.catalog.nodes import table
from infra.catalog.offerings import OFFERINGS, missing_in, offerings
from infra.catalog.refresh import render as rendered
from infra.catalog.refresh import summary
from infra.catalog.refresh_offerings import render
from infra.catalog.regions import HYPERPOD, WITHOUT_EKS, ZONES
from infra.config import Eks
from infra.preflight.rules.network import zone_prefix
from lustrain.accelerators import PEAKS

DUMPS = Path(moto.__file__).parent / "ec2/resources/instance_type_offerings/availability-zone-id"


@pytest.fixture(scope="module")
def answers() -> dict[str, list[dict[str, Any]]]:
    """By region; moto ships dumps of DescribeInstanceTypeOfferings."""
    return {dump.name.partition(".")[0]: json.loads(gzip.decompress(dump.read_bytes())) for dump in DUMPS.iterdir()}


def test_the_offerings_are_what_their_source_says(answers: dict[str, list[dict[str, Any]]]) -> None:
    every = [one for region in sorted(answers) for one in answers[region]]
    assert render(every, offerings().source, offerings().date) == OFFERINGS.read_text(encoding="utf-8")


def test_the_refresh_takes_what_the_command_line_of_aws_prints(
    answers: dict[str, list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = [tmp_path / f"{region}.json" for region in ("us-west-1", "us-west-2")]
    for file in files:
        file.write_text(json.dumps({"InstanceTypeOfferings": answers[file.stem]}))
    monkeypatch.setattr(refresh, "OFFERINGS", tmp_path / "new.jsonl")
    assert refresh.main([*map(str, files), "--source", "me", "--date", "2027-01-01"]) == 0
    head, *rows = map(json.loads, (tmp_path / "new.jsonl").read_text().splitlines())
    assert (head["source"], head["date"]) == ("me", "2027-01-01")
    assert head["asked"] == [f"usw1-az{n}" for n in (1, 3)] + [f"usw2-az{n}" for n in (1, 2, 3, 4)]
    assert {"types": ["p6-b300.48xlarge"], "zones": ["usw2-az1", "usw2-az2"]} in rows
    assert "2 files" in capsys.readouterr().out


def test_each_type_with_efa_is_somewhere_in_the_listed_zones() -> None:
    assert {kind.name for kind in snapshot().types.values() if kind.efa} <= offerings().zones.keys()
    assert offerings().covered <= {zone for zones in ZONES.values() for zone in zones}


def test_zone_that_was_not_listed_is_unknown_not_without_type() -> None:
    assert missing_in("p6-b300.48xlarge", "usw2-az3") == offerings().zones["p6-b300.48xlarge"]
    assert missing_in("p6-b300.48xlarge", "usw2-az2") is None
    assert missing_in("p6-b300.48xlarge", "cnn1-az1") is None
    assert missing_in("m5.2xlarge", "usw2-az3") is None


def test_zones_carry_their_regions_prefix_in_known_regions() -> None:
    assert ZONES.keys() <= regions()
    assert ZONES.keys() >= HYPERPOD
    assert {zone for zones in ZONES.values() for zone in zones} >= WITHOUT_EKS
    for region, zones in ZONES.items():
        assert zones
        assert all(zone.startswith(f"{zone_prefix(region)}-az") for zone in zones), region


def test_support_of_kubernetes_versions_ends_in_order() -> None:
    found = list(VERSIONS.values())
    for older, newer in pairwise(found):
        assert int(newer.name[2:]) == int(older.name[2:]) + 1
        assert older.standard_ends < newer.standard_ends
    assert all(one.extended_ends == one.standard_ends.replace(year=one.standard_ends.year + 1) for one in found)


def test_newest_version_that_eks_and_hyperpod_take_is_default() -> None:
    assert Eks().version == NEWEST == "1.35"
    assert Eks().upgrade_policy == "STANDARD"


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    """moto ships a dump of DescribeInstanceTypes."""
    dump = Path(moto.__file__).parent / "ec2/resources/instance_types.json.gz"
    return list(json.loads(gzip.decompress(dump.read_bytes())).values())


def test_the_snapshot_is_what_its_source_says(records: list[dict[str, Any]]) -> None:
    assert rendered(records, snapshot().source, snapshot().date) == SNAPSHOT.read_text(encoding="utf-8")


def test_a_p5_is_what_its_maker_says() -> None:
    found = instance("ml.p5.48xlarge")
    assert found is not None
    assert found.name == "p5.48xlarge"
    assert (found.vcpus, found.memory_mib, found.efa, len(found.cards)) == (192, 2048 * 1024, 32, 32)
    assert found.accelerators == (Accelerator("gpu", "NVIDIA H100", 8, 81920),)
    assert (found.nvme_count, found.nvme_gb) == (8, 30400)
    assert found.usage == {"on-demand", "spot", "capacity-block"}
    assert found.architecture == "x86_64"


def test_trainium_counts_as_an_accelerator() -> None:
    found = instance("trn1.32xlarge")
    assert found is not None
    assert [(one.kind, one.count) for one in found.accelerators] == [("neuron", 16)]


def test_cards_with_a_gap_in_their_numbers_are_refused(records: list[dict[str, Any]]) -> None:
    record = next(one for one in records if one["InstanceType"] == "p4d.24xlarge")
    cards = [
        {**card, "NetworkCardIndex": 2 * card["NetworkCardIndex"]} for card in record["NetworkInfo"]["NetworkCards"]
    ]
    with pytest.raises(ValueError, match="not numbered from 0"):
        summary({**record, "NetworkInfo": {**record["NetworkInfo"], "NetworkCards": cards}})


WRITTEN = Path(node_setup.__file__).parent / "settings" / "instances.toml"


def test_the_written_table_is_what_the_catalogue_says_now() -> None:
    assert WRITTEN.read_text(encoding="utf-8") == table(), (
        "fix: python -m infra.catalog.nodes > node_setup/settings/instances.toml"
    )


def test_every_type_is_in_it_once() -> None:
    written = tomllib.loads(table())
    plain = [name for names in written["plain"].values() for name in names]
    assert sorted([*written["instance"], *plain]) == sorted(snapshot().types)
    assert written["instance"]["p5.48xlarge"] == {"gpus": 8, "gpu": "NVIDIA H100", "efa": 32, "nvme": 8}
    assert written["instance"]["trn1.32xlarge"]["neuron"] == 16
    assert "c7i.4xlarge" in written["plain"]["0"]


@pytest.mark.parametrize(
    ("name", "gbit"),
    [("p5.48xlarge", 3200), ("p4d.24xlarge", 400), ("g6e.48xlarge", 400), ("g5.xlarge", 2.5), ("m1.small", 0)],
)
def test_network_is_what_it_carries_without_end(name: str, gbit: float) -> None:
    """Also where cards could carry more together, where AWS names cards, a burst, or a word."""
    found = instance(name)
    assert found
    assert found.network_gbit == gbit


def test_every_gpu_of_a_known_peak_is_in_the_catalogue() -> None:
    assert PEAKS.keys() <= {device.name for found in snapshot().types.values() for device in found.accelerators}


@pytest.fixture(scope="module")
def fsx_says() -> Callable[[str, str], str]:
    """AWS's text about a member of a shape of FSx's API, which ships with botocore, without markup and commas in numbers."""
    shapes = Loader().load_service_model("fsx", "service-2")["shapes"]

    def text(shape: str, member: str) -> str:
        plain = re.sub(r"<[^>]+>", "", str(shapes[shape]["members"][member]["documentation"]))
        return re.sub(r"(?<=\d),(?=\d{3})", "", re.sub(r"\s+", " ", plain))

    return text


def numbers(text: str, before: str, after: str) -> tuple[int, ...]:
    """The numbers of a text between two phrases."""
    _, found, rest = text.partition(before)
    assert found, text
    return tuple(map(int, re.findall(r"\d+", rest.partition(after)[0])))


def test_numbers_of_lustre_are_those_of_awss_api(fsx_says: Callable[[str, str], str]) -> None:
    """Plan, preflight and the embedded AWS all take these numbers from the catalogue: a wrong one would pass all three."""
    new = "CreateFileSystemLustreConfiguration"
    rates = fsx_says(new, "PerUnitStorageThroughput")
    assert numbers(rates, "For PERSISTENT_2 SSD storage:", "MB/s/TiB") == fsx.PER_TIB_MB_S
    capacity = numbers(
        fsx_says("CreateFileSystemRequest", "StorageCapacity"), "SSD storage type", "For PERSISTENT_1 HDD"
    )
    assert capacity == (fsx.SMALLEST_GIB, fsx.STEP_GIB, fsx.STEP_GIB)
    iops = fsx_says("CreateFileSystemLustreMetadataConfiguration", "Iops")
    *small, step, most = numbers(iops, "For SSD file systems", "For Intelligent-Tiering")
    assert (*small[:-1], *range(step, most + 1, step)) == fsx.METADATA_IOPS
    assert numbers(iops, "For Intelligent-Tiering file systems", "Iops doesn") == fsx.TIERED_METADATA_IOPS
    assert set(numbers(fsx_says(new, "ThroughputCapacity"), "Valid values", "You pay")) == {fsx.TIERED_STEP_MB_S}
    cache = numbers(fsx_says("LustreReadCacheConfiguration", "SizeGiB"), "minimum of", "of throughput")
    assert cache == (*fsx.CACHE_GIB, fsx.TIERED_STEP_MB_S)
    most_mb_s = Loader().load_service_model("fsx", "service-2")["shapes"]["ThroughputCapacityMbps"]["max"]
    assert most_mb_s == fsx.TIERED_LARGEST_MB_S
    links = Loader().load_service_model("fsx", "service-2")["operations"]["CreateDataRepositoryAssociation"]
    assert numbers(links["documentation"], "You can have a maximum of", "data repository") == (fsx.MOST_ASSOCIATIONS,)
    version = fsx_says("CreateFileSystemRequest", "FileSystemTypeVersion")
    assert f"Default value is {fsx.VERSION} when DeploymentType is set to PERSISTENT_2 with a metadata" in version


def test_rates_of_openzfs_are_those_of_awss_api(fsx_says: Callable[[str, str], str]) -> None:
    """AWS names the second generation in one zone SINGLE_AZ_2 there, SINGLE_AZ_HA_2 in DeploymentType."""
    rates = fsx_says("CreateFileSystemOpenZFSConfiguration", "ThroughputCapacity")
    assert numbers(rates, "SINGLE_AZ_2, valid values are", "MBps") == fsx.HOME_MB_S


def test_steps_of_efa_and_automatic_iops_are_those_of_the_guide() -> None:
    """Numbers that only the user guide has, written here a second time, from these pages.

    https://docs.aws.amazon.com/fsx/latest/LustreGuide/increase-storage-capacity.html: multiples of 38400 GiB at 125 MBps/TiB,
    of 19200 at 250, of 9600 at 500, of 4800 at 1000; read on 2026-11-26.
    https://docs.aws.amazon.com/fsx/latest/LustreGuide/managing-metadata-performance.html: 1500 IOPS at 1200 GiB, 3000 at 2400,
    6000 at 4800 to 9600, 12000 at 12000 to 45600, and 12000 for every 24000 GiB from 48000 on.
    """
    assert fsx.EFA_STEP_GIB == {125: 38_400, 250: 19_200, 500: 9_600, 1000: 4_800}
    assert {rate * step // fsx.GIB_PER_TIB for rate, step in fsx.EFA_STEP_GIB.items()} == {fsx.EFA_SMALLEST_MB_S}
    table = {
        1_200: 1_500, 2_400: 3_000, 4_800: 6_000, 9_600: 6_000, 12_000: 12_000, 45_600: 12_000,
        48_000: 24_000, 69_600: 24_000, 72_000: 36_000, 384_000: 192_000, 768_000: 192_000,
    }  # fmt: skip
    assert {capacity: fsx.automatic_iops(capacity) for capacity in table} == table
    assert set(table.values()) <= set(fsx.METADATA_IOPS)
