"""No parser raises, whatever a program or a file says."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node_setup.agent.facts import clock, environment, instance, kernel, lustre, machine, scene, services
from node_setup.agent.facts.devices import blocks, fabric, gpu, hpu
from tests.node_setup.recorded_host import RECORDED

PARSERS: dict[str, Callable[[str], Any]] = {
    "mounts": scene.parse_mounts,
    "mountinfo": blocks.parse_mountinfo,
    "modules": scene.parse_modules,
    "modalias": lambda text: scene.parse_modalias("slot", text),
    "start": scene.start_ticks,
    "os-release": machine.parse_os_release,
    "cmdline": machine.parse_cmdline,
    "bracketed": machine.chosen,
    "ranges": machine.count_of,
    "meminfo": machine.parse_meminfo,
    "sysctl": kernel.parse_sysctl_file,
    "modprobe": kernel.parse_modprobe_file,
    "limits": kernel.parse_limits,
    "limits.d": kernel.parse_limit_file,
    "units": lambda text: services.parse_services(("a.service", "b.service"), text),
    "dpkg": lambda text: services.parse_dpkg(text, ("linux-*",)),
    "versionlock": services.parse_versionlock,
    "chrony": clock.parse_tracking,
    "lctl": lustre.parse_parameters,
    "lnetctl": lustre.parse_nets,
    "lnetctl peer": lustre.parse_peers,
    "lnetctl udsp": lustre.parse_udsp,
    "route": lustre.default_interface,
    "ip addr": lambda text: lustre.own_interface(text, text),
    "lfs df": lustre.parse_df,
    "lfs getstripe": lustre.parse_layout,
    "fi_info": fabric.parse_domains,
    "efa packages": fabric.parse_installed,
    "nvidia-smi": lambda text: [gpu.device_of(row) for row in gpu.parse_rows(gpu.FIELDS, text)],
    "nvlink": gpu.parse_nvlinks,
    "nvlink errors": gpu.parse_nvlink_errors,
    "xid": gpu.parse_xids,
    "hl-smi": lambda text: [hpu.device_of(row) for row in gpu.parse_rows(hpu.FIELDS, text)],
    "addresses": lambda text: sorted(instance.parse_addresses(text)),
    "shell": environment.parse_shell,
    "unit file": environment.parse_unit,
    "slurm.conf": environment.parse_prologs,
}
_SAMPLES = [path.read_text() for path in sorted(RECORDED.glob("*.*")) if path.suffix != ".md"]


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A recorded output with a piece cut out and another text put in its place."""
    sample = draw(st.sampled_from(_SAMPLES))
    start, end = sorted((draw(st.integers(0, len(sample))), draw(st.integers(0, len(sample)))))
    return sample[:start] + draw(st.text(max_size=20)) + sample[end:]


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=60, deadline=None)
@given(text=st.one_of(st.text(), damaged()))
def test_a_parser_takes_any_text_and_gives_plain_data(name: str, text: str) -> None:
    json.dumps(PARSERS[name](text))


@settings(max_examples=100, deadline=None)
@given(head=st.binary(max_size=70_000), tail=st.binary(max_size=70_000))
def test_any_bytes_at_a_disks_ends_are_a_known_signature_or_none(head: bytes, tail: bytes) -> None:
    assert blocks.signature(head, tail) in {None, "linux_raid_member", *(name for _, _, name in blocks._SIGNATURES)}


_values = st.text(
    st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="\u2028\u2029\x85"), max_size=30
)


@settings(max_examples=200, deadline=None)
@given(value=_values)
def test_a_value_quoted_for_a_shell_comes_back_as_it_was(value: str) -> None:
    import shlex

    assert environment.parse_shell(f"  export A={shlex.quote(value)} # why\n") == [(1, "A", value)]
    assert environment.parse_shell(f"B=1; A={shlex.quote(value)}")[-1] == (1, "A", value)
