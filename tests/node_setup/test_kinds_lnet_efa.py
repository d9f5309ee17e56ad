"""LNet over EFA: facts in, commands and a unit out. That the commands do it is shown on the lab's nodes, with stand-ins."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from node_setup.agent import owned
from node_setup.agent.kinds.lustre import lnet_efa
from node_setup.agent.model import Remark, Remove, Request, Run, Step, Write
from node_setup.agent.run.boot import WAIT_S
from node_setup.agent.run.plan import plan as whole
from node_setup.agent.settings.catalog import load
from tests.node_setup.kinds_facts import commands, machine, plan, remark, service, steps

DEVICES = [{"name": f"rdmap{number:02d}s0", "driver": "efa"} for number in range(32)]
EFA_NET = {"net": "efa", "nids": [{"nid": f"1.0.0.{n}@efa", "interface": f"rdmap{n * 4:02d}s0"} for n in range(8)]}
TCP_NET = {"net": "tcp", "nids": [{"nid": "10.0.0.1@tcp", "interface": "ens65"}]}
OVER_EFA, OVER_TCP = ["10.0.0.9@tcp", "1.9.71.0@efa"], ["10.0.0.9@tcp"]
DOCUMENT = {"backend": "hyperpod-slurm", "lustre": {"path": "/fsx", "efa": True}}
MOUNT = {
    "source": "10.0.0.9@tcp:/xeo3rbev",
    "target": "/fsx",
    "fstype": "lustre",
    "options": ["rw", "noatime", "seclabel", "flock", "lazystatfs", "encrypt"],
}


def node(
    nets: Sequence[Any] | None = (), *, preferred: Sequence[str] = (), peers: Sequence[str] | None = None, **lustre: Any
) -> dict[str, Any]:
    """A p5; `peers` are the addresses of the one server of what is mounted at /fsx, None where nothing is."""
    found: dict[str, Any] = {"nets": nets, "preferred": list(preferred), "interface": "ens32", "lnetctl": True}
    server: Any = peers and [{"nids": list(peers)}]
    found.update(peers=server, **lustre)
    facts = machine(lustre=found, efa={"devices": DEVICES}, mounts=[MOUNT] if peers else [])
    facts["files"][owned.LNET_UNIT] = {"content": lnet_efa.lnet_unit(), "mode": "0644"}
    facts["services"]["lustrain-lnet.service"] = service("loaded", "active", "enabled", "success")
    return facts


BOTH: dict[str, Any] = {"nets": [TCP_NET, EFA_NET], "preferred": ["efa"]}


def said(facts: dict[str, Any]) -> list[Step | Remark]:
    return plan("lustre.efa", facts, DOCUMENT, value="8")


def test_tcp_and_every_fourth_efa_device_come_up_before_mounting() -> None:
    assert commands(said(node(nets=None))) == [
        "modprobe kefalnd ipif_name=ens32",
        "modprobe ksocklnd",
        "lnetctl lnet configure",
        "lnetctl net add --net tcp --if ens32",
        *(f"lnetctl net add --net efa --if rdmap{number:02d}s0 --peer-credits 32" for number in range(0, 32, 4)),
        "lnetctl set discovery 1",
        "lnetctl udsp add --src efa --priority 0",
    ]


MOUNTED = "mount -t lustre -o noatime,flock,_netdev 10.0.0.9@tcp:/xeo3rbev /fsx"


def test_lustre_over_tcp_is_remounted_once_efa_is_up() -> None:
    done = commands(said(node([TCP_NET], peers=OVER_TCP)))
    assert done[0] == "modprobe kefalnd ipif_name=ens65"
    assert not [one for one in done if "--net tcp" in one]
    assert done[-2:] == ["umount /fsx", MOUNTED]


NOTED = json.dumps({"source": "10.0.0.9@tcp:/xeo3rbev", "target": "/fsx", "options": "noatime,flock,_netdev"}) + "\n"


def test_early_mount_is_remounted_or_by_the_next_run() -> None:
    again = Run(tuple(MOUNTED.split()), 150.0, tries=3)
    (step,) = steps(said(node(**BOTH, peers=OVER_TCP)))
    note, umount = Write(owned.REMOUNT, NOTED), Run(("umount", "/fsx"), 60.0)
    assert step.actions == (note, umount, again, Write(owned.REMOUNTED, "once per boot\n"), Remove(owned.REMOUNT))
    facts = node(**BOTH)
    facts["files"][owned.REMOUNT] = {"content": NOTED, "mode": "0644"}
    assert commands(said(facts)) == [MOUNTED]
    facts["mounts"] = [MOUNT]
    assert remark(said(facts)).status == "ok"


def remounted() -> dict[str, Any]:
    """A node that mounted anew in this boot, and is over TCP all the same."""
    facts = node(**BOTH, peers=OVER_TCP)
    facts["files"][owned.REMOUNTED] = {"content": "", "mode": "0644"}
    return facts


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        (node(**BOTH), "ok"),
        (node(**BOTH, peers=OVER_EFA), "ok"),
        (remounted(), "reboot"),
        (node(lnetctl=False), "failed"),
        (node(interface=None), "failed"),
        (node(nets=None) | {"modules": {"loaded": ["lnet"]}}, "unknown"),
    ],
)
def test_a_node_that_has_it_or_cannot_is_left_alone(facts: dict[str, Any], status: str) -> None:
    assert remark(said(facts)).status == status


def test_a_killed_apply_goes_on_where_it_ended() -> None:
    half = {"net": "efa", "nids": EFA_NET["nids"][:6]}
    done = commands(said(node([TCP_NET, half])))
    assert len([one for one in done if "--net efa" in one]) == 2
    assert done[-1] == "lnetctl udsp add --src efa --priority 0"
    assert not [one for one in done if "tcp" in one]


def test_lnet_unit_precedes_all_mounts_and_yields_to_aws_unit() -> None:
    facts = node(**BOTH)
    facts["files"][owned.LNET_UNIT] = None
    (step,) = steps(said(facts))
    assert step.actions[0] == Write(owned.LNET_UNIT, lnet_efa.lnet_unit())
    assert "systemctl enable lustrain-lnet.service" in commands([step])
    lines = dict(line.split("=", 1) for line in lnet_efa.lnet_unit().splitlines() if "=" in line)
    assert {"remote-fs-pre.target", "kubelet.service", "lustrain-boot.service"} <= set(lines["Before"].split())
    assert int(lines["TimeoutStartSec"]) >= 16 * lnet_efa.ADD_SECONDS + WAIT_S
    assert lines["Restart"] == "on-failure"
    facts["lustre"]["aws_configured"] = True
    assert remark(said(facts)).status == "ok"


@pytest.mark.parametrize(
    ("entry", "devices", "applies"), [(8, DEVICES, True), (0, DEVICES, False), (None, DEVICES, False), (8, [], False)]
)
def test_lnet_applies_to_groups_with_interfaces_and_devices(
    entry: int | None, devices: list[Any], applies: bool
) -> None:
    """Also on EKS, where a node has Lustre nowhere: pods mount it over the node's LNet."""
    group = {"type": "p5.48xlarge"} | ({} if entry is None else {"lustre_efa": entry})
    request = Request({"backend": "hyperpod-eks", "lustre": None, "groups": {"train": group}}, "train", "efa-gpu")
    facts = node() | {"efa": {"devices": devices}}
    facts["files"][owned.LNET_UNIT] = None
    made = whole([one for one in load() if one.id == "lustre.efa"], facts, request)
    assert bool(made.steps) == applies
    assert len([one for one in commands(made.steps) if "--net efa" in one]) == (8 if applies else 0)
