"""Each plain kind: facts in, steps and remarks out; what is in place makes no step."""

from __future__ import annotations

from typing import Any

import pytest

from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.kinds import KINDS, planner
from node_setup.agent.kinds.agent import UNIT
from node_setup.agent.kinds.hold import LOCKED
from node_setup.agent.model import PERSISTED, RUNTIME, Remark, Remove, Request, Run, Setting, Step, Write
from node_setup.agent.owned import HEADER
from node_setup.agent.settings.catalog import load
from tests.node_setup.plain_node import after, bare

NO_SYSTEMD = {"init": "other", "services": {}}
READ_ONLY = {"disk": {"/": {"read_only": False}, "/etc": {"read_only": True}}}


def setting(kind: str, key: str = "", value: str = "", **more: Any) -> Setting:
    return Setting(f"{kind}.{key or 'x'}", kind, ("cpu",), "because", "here", key, value, **more)


def said(one: Setting, facts: dict[str, Any], **request: Any) -> list[Step | Remark]:
    return planner(one.kind)([one], frozenset({one.id}), facts, Request(**request))


def brief(lines: list[Step | Remark]) -> list[tuple[str, str | None]]:
    """(part or status, found) of each."""
    return [(one.part if isinstance(one, Step) else one.status, one.found) for one in lines]


def done(one: Setting, facts: dict[str, Any], **request: Any) -> list[Step | Remark]:
    """What is said after all steps were done."""
    return said(one, after(facts, [step for step in said(one, facts, **request) if isinstance(step, Step)]), **request)


MAPS = setting("sysctl", "vm.max_map_count", "524288", compare="at-least")
RATIO = setting("sysctl", "vm.dirty_ratio", "5")
UVM = setting("module-load", "nvidia-uvm")
CREDITS = setting("module-option", "ksocklnd.credits", "2560", compare="at-least")
MEMLOCK = setting("limit", "memlock", "unlimited")
SLURMD = setting("slurmd-limit", "memlock", "infinity")
NOFILE = setting("slurmd-limit", "nofile", "131072", compare="at-least")
FILE = setting(
    "file", options={"path": owned.NEEDRESTART, "lines": ["a", "b"], "after": [["systemctl", "daemon-reload"]]}
)
HOLD = setting("hold", options={"packages": ["linux-aws", "lustre-client-modules-*"]})
CSTATE = setting("kernel-argument", "processor.max_cstate", "1", compare="at-most")
CHRONY = setting("unit", "chrony.service")
CLOCK = setting("clock", value="169.254.169.123", options={"flags": "prefer iburst"})
THP = setting("observe", "kernel.thp", "madvise")

CASES: list[tuple[str, Setting, dict[str, Any], list[tuple[str, str | None]]]] = [
    ("both parts", MAPS, {}, [(RUNTIME, "65530"), (PERSISTED, None)]),
    ("runtime is there", MAPS, {"sysctl": {"vm.max_map_count": "1048576"}}, [(PERSISTED, None)]),
    ("no such key", MAPS, {"sysctl": {}}, [(Status.SKIPPED, None)]),
    ("sysctl unreadable", MAPS, {"sysctl": None}, [(Status.UNKNOWN, None)]),
    ("file unreadable", MAPS, {"files": {}}, [(RUNTIME, "65530"), (Status.UNKNOWN, None)]),
    ("read-only /etc", MAPS, READ_ONLY, [(RUNTIME, "65530"), (Status.FAILED, None)]),
    ("module", UVM, {}, [(RUNTIME, "not loaded"), (PERSISTED, None)]),
    ("module loaded", UVM, {"modules__loaded": ["nvidia_uvm"]}, [(PERSISTED, None)]),
    ("no modules", UVM, {"modules__supported": False}, [(Status.SKIPPED, None)]),
    ("modules unknown", UVM, {"modules__supported": None}, [(Status.UNKNOWN, None)]),
    ("option", CREDITS, {}, [(PERSISTED, None)]),
    ("option, AWS owns it", CREDITS, {"modules__aws_lustre_block": True}, [(Status.SKIPPED, None)]),
    ("option, no modules", CREDITS, {"modules__supported": False}, [(Status.SKIPPED, None)]),
    ("option, unknown", CREDITS, {"modules": None}, [(Status.UNKNOWN, None)]),
    ("limit", MEMLOCK, {}, [(PERSISTED, None)]),
    ("limit, read-only", MEMLOCK, READ_ONLY, [(Status.FAILED, None)]),
    ("slurmd, jobs unknown", SLURMD, {"jobs": None}, [(PERSISTED, None)]),
    ("slurmd, under a job", SLURMD, {"jobs": [{"kind": "slurm", "id": "7"}]}, [(PERSISTED, None)]),
    ("slurmd, idle", SLURMD, {"jobs": []}, [(PERSISTED, None), (RUNTIME, "65536 65536")]),
    ("slurmd, idle, not systemd's", SLURMD, {"jobs": [], "services": {}}, [(PERSISTED, None)]),
    ("file", FILE, {}, [(PERSISTED, None)]),
    ("file, read-only", FILE, READ_ONLY, [(Status.FAILED, None)]),
    ("file, unknown", FILE, {"files": {}}, [(Status.UNKNOWN, None)]),
    ("hold", HOLD, {}, [(PERSISTED, None)]),
    ("half held", HOLD, {"packages__held": ["linux-aws"]}, [(PERSISTED, "linux-aws")]),
    ("hold nothing", HOLD, {"packages__installed": {"x": "1"}}, [(Status.SKIPPED, None)]),
    ("hold, dnf", HOLD, {"packages__manager": "dnf"}, [(Status.SKIPPED, None)]),
    ("hold, unknown", HOLD, {"packages__installed": None}, [(Status.UNKNOWN, None)]),
    ("argument, reported", CSTATE, {}, [(Status.SKIPPED, None)]),
    ("argument, other loader", CSTATE, {"os": {"family": "other"}}, [(Status.SKIPPED, None)]),
    (
        "argument there, other loader",
        CSTATE,
        {"os": {}, "kernel__cmdline": {"processor.max_cstate": "1"}},
        [(Status.OK, "1")],
    ),
    ("argument there", CSTATE, {"kernel__cmdline": {"processor.max_cstate": "0"}}, [(Status.OK, "0")]),
    ("argument too high", CSTATE, {"kernel__cmdline": {"processor.max_cstate": "3"}}, [(Status.SKIPPED, "3")]),
    ("argument, unknown", CSTATE, {"kernel__cmdline": None}, [(Status.UNKNOWN, None)]),
    ("unit", CHRONY, {}, [(PERSISTED, "disabled"), (RUNTIME, "inactive")]),
    ("unit, no systemd", CHRONY, NO_SYSTEMD, [(Status.SKIPPED, None)]),
    ("unit, unknown", CHRONY, {"services": None}, [(Status.UNKNOWN, None)]),
    ("unit, not installed", CHRONY, {"services": {"chrony.service": {"load": "not-found"}}}, [(Status.SKIPPED, None)]),
    ("unit, masked", CHRONY, {"services": {"chrony.service": {"load": "masked"}}}, [(Status.SKIPPED, "masked")]),
    ("clock", CLOCK, {}, [(PERSISTED, None)]),
    ("clock, no EC2", CLOCK, {"instance": {"type": None, "source": None}}, [(Status.SKIPPED, None)]),
    (
        "clock, own machine",
        CLOCK,
        {"instance": {"type": "p5.48xlarge", "source": "node.json"}},
        [(Status.SKIPPED, None)],
    ),
    ("clock, no chrony", CLOCK, {"services": {}}, [(Status.SKIPPED, None)]),
    ("clock, unknown", CLOCK, {"services": None}, [(Status.UNKNOWN, None)]),
    ("clock, chrony 3.5", CLOCK, {"time__folders": []}, [(Status.SKIPPED, None)]),
    ("clock, its file is not read", CLOCK, {"time__folders": None}, [(Status.UNKNOWN, None)]),
    ("clock, Rocky", CLOCK, {"os": {"id": "rocky", "family": "rhel"}}, [(Status.SKIPPED, None)]),
    ("observe", THP, {}, [(Status.OK, "madvise")]),
    ("observe, other", THP, {"kernel__thp": "always"}, [(Status.SKIPPED, "always")]),
    ("observe, unknown", THP, {"kernel__thp": None}, [(Status.UNKNOWN, None)]),
]


@pytest.mark.parametrize(("one", "changes", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_facts_in_steps_and_remarks_out(one: Setting, changes: dict[str, Any], expected: list[Any]) -> None:
    assert brief(said(one, bare(**changes))) == expected


@pytest.mark.parametrize("one", [MAPS, RATIO, UVM, MEMLOCK, FILE, HOLD, CHRONY, CLOCK], ids=lambda one: one.kind)
def test_what_was_done_is_ok_and_is_not_done_again(one: Setting) -> None:
    (remark,) = done(one, bare())
    assert isinstance(remark, Remark)
    assert remark.status == Status.OK


@pytest.mark.parametrize("one", [CREDITS, SLURMD, NOFILE], ids=lambda one: one.id)
def test_what_was_loaded_before_or_started_under_a_job_waits(one: Setting) -> None:
    (step,) = said(one, bare())
    assert isinstance(step, Step)
    assert step.needs in ("reboot", "restart of slurmd")
    assert not any(isinstance(action, Run) and "restart" in action.command for action in step.actions)
    assert [line.status for line in done(one, bare()) if isinstance(line, Remark)] == [Status.REBOOT]


def test_an_idle_slurmd_is_restarted_after_its_drop_in_was_read() -> None:
    on_disk, running = said(SLURMD, bare(jobs=[]))
    assert isinstance(on_disk, Step)
    assert isinstance(running, Step)
    assert (on_disk.needs, on_disk.actions[-1]) == ("", Run(("systemctl", "daemon-reload")))
    assert running.actions == (Run(("systemctl", "restart", "slurmd.service")),)


def test_what_is_not_running_yet_needs_nothing() -> None:
    facts = bare(modules__parameters={}, limits__slurmd=None)
    for one in (CREDITS, SLURMD):
        (step,) = said(one, facts)
        assert isinstance(step, Step)
        assert step.needs == ""
        (remark,) = done(one, facts)
        assert isinstance(remark, Remark)
        assert remark.status == Status.OK


def test_every_kind_leaves_alone_what_is_not_selected() -> None:
    for one in (MAPS, UVM, CREDITS, MEMLOCK, SLURMD, FILE, HOLD, CSTATE, CHRONY, CLOCK, THP):
        assert planner(one.kind)([one], frozenset(), bare(), Request(only=("other",))) == []


def test_every_name_of_the_registry_is_a_module_with_a_planner() -> None:
    assert all(callable(planner(kind)) for kind in KINDS)


@pytest.mark.parametrize(
    ("path", "value", "conflict"),
    [
        ("/etc/modprobe.d/zz.conf", "256", True),
        ("/etc/modprobe.d/zz.conf", "4096", False),
        ("/etc/modprobe.d/aa.conf", "256", False),
    ],
)
def test_a_later_modprobe_file_with_a_lower_option_conflicts(path: str, value: str, conflict: bool) -> None:
    lines = said(CREDITS, bare(modules__files=[{"path": path, "options": {"ksocklnd": {"credits": value}}}]))
    assert (Status.CONFLICT in [kind for kind, _ in brief(lines)]) is conflict


def test_lines_of_ours_go_once_aws_owns_the_options() -> None:
    facts = bare(modules__aws_lustre_block=True)
    facts["files"][owned.MODPROBE] = {
        "content": f"{HEADER}# {CREDITS.id}\noptions ksocklnd credits=2560\n",
        "mode": "0644",
    }
    lines = said(CREDITS, facts)
    assert [line.actions for line in lines if isinstance(line, Step)] == [(Remove(owned.MODPROBE),)]


@pytest.mark.parametrize(
    ("path", "line", "conflict"),
    [
        ("/etc/security/limits.conf", ["*", "hard", "memlock", "64"], False),
        ("/etc/security/limits.conf", ["@users", "hard", "memlock", "64"], True),
        ("/etc/security/limits.conf", ["@users", "hard", "memlock", "-1"], False),
        ("/etc/security/limits.conf", ["@users", "hard", "nofile", "64"], False),
        ("/etc/security/limits.d/10-x.conf", ["*", "-", "memlock", "64"], False),
        ("/etc/security/limits.d/99-x.conf", ["*", "-", "memlock", "64"], True),
    ],
)
def test_a_limit_that_wins_over_ours_conflicts(path: str, line: list[str], conflict: bool) -> None:
    lines = said(MEMLOCK, bare(limits__files=[{"path": path, "lines": [line]}]))
    assert (Status.CONFLICT in [kind for kind, _ in brief(lines)]) is conflict


def test_root_whom_a_star_leaves_out_has_the_limit_too() -> None:
    (step,) = said(MEMLOCK, bare())
    assert isinstance(step, Step)
    assert step.wanted.split("; ") == [
        f"{who} {kind} memlock unlimited" for who in ("*", "root") for kind in ("soft", "hard")
    ]


def test_the_drop_in_of_slurmd_is_a_service_section_and_systemd_hears_of_it() -> None:
    (step,) = said(SLURMD, bare())
    assert isinstance(step, Step)
    text = f"{HEADER}[Service]\n# {SLURMD.id}\nLimitMEMLOCK=infinity\n"
    assert step.actions == (Write(owned.SLURMD, text), Run(("systemctl", "daemon-reload")))


@pytest.mark.parametrize(
    ("system", "path"),
    [({"id": "ubuntu", "family": "debian"}, owned.CHRONY), ({"id": "amzn", "family": "rhel"}, owned.CHRONY_AL)],
)
def test_chronys_source_is_in_the_folder_of_the_distribution(system: dict[str, str], path: str) -> None:
    (step,) = said(CLOCK, bare(os=system, time__folders=[path.rpartition("/")[0]]))
    assert isinstance(step, Step)
    write, reload = step.actions
    assert isinstance(write, Write)
    assert (write.path, reload) == (path, Run(("chronyc", "reload", "sources"), 10.0))
    assert write.content.endswith("\nserver 169.254.169.123 prefer iburst\n")


def test_only_installed_packages_are_held_and_held_ones_are_left() -> None:
    (step,) = said(HOLD, bare(packages__held=["linux-aws"]))
    assert isinstance(step, Step)
    (action,) = step.actions
    assert isinstance(action, Run)
    assert (action.command, action.busy) == (("apt-mark", "hold", "lustre-client-modules-aws"), LOCKED)


def test_what_nvidias_driver_brings_is_held_together_and_the_container_toolkit_is_not() -> None:
    driver = [
        *(
            "nvidia-headless-550-server",
            "nvidia-utils-550-server",
            "nvidia-kernel-common-550-server",
            "nvidia-driver-550",
        ),
        *(
            "libnvidia-compute-550-server",
            "libnvidia-nscq-550",
            "nvidia-fabricmanager-550",
            "nvidia-dkms-550-server-open",
        ),
    ]
    others = ["libnvidia-container1", "libnvidia-container-tools", "nvidia-container-toolkit", "nvidia-settings"]
    (hold,) = (one for one in load() if one.id == "hold.nvidia-driver")
    (step,) = said(hold, bare(packages__installed=dict.fromkeys([*driver, *others], "550")))
    assert isinstance(step, Step)
    assert step.wanted.split(", ") == sorted(driver)


def test_a_source_that_chrony_no_longer_reads_is_a_conflict_and_says_what_is_missing() -> None:
    there = after(bare(), [one for one in said(CLOCK, bare()) if isinstance(one, Step)])
    there["time"]["folders"] = ["/run/chrony-dhcp"]
    (remark,) = said(CLOCK, there)
    assert isinstance(remark, Remark)
    assert remark.status == Status.CONFLICT
    assert "no `sourcedir /etc/chrony/sources.d`" in remark.why


def test_hyperpod_loads_modules_before_us_and_the_row_says_that_each_new_node_needs_a_reboot() -> None:
    there = after(bare(), [one for one in said(CREDITS, bare()) if isinstance(one, Step)])
    for backend, expected in (("hyperpod-slurm", True), ("machines", False)):
        (remark,) = said(CREDITS, there, document={"backend": backend})
        assert isinstance(remark, Remark)
        assert remark.status == Status.REBOOT
        assert ("each node that it brings needs a reboot" in remark.why) is expected


def test_slurmd_is_not_restarted_while_our_boot_unit_runs_which_it_is_ordered_after() -> None:
    facts = bare(jobs=[])
    facts["services"][UNIT] = {"load": "loaded", "active": "activating", "enabled": "enabled", "result": "success"}
    (step,) = said(SLURMD, facts)
    assert isinstance(step, Step)
    assert (step.part, step.needs) == (PERSISTED, "restart of slurmd")
    facts["services"][UNIT]["active"] = "active"
    assert [one.part for one in said(SLURMD, facts) if isinstance(one, Step)] == [PERSISTED, RUNTIME]


def test_the_boot_loader_is_told_only_where_a_reboot_is_allowed() -> None:
    (step,) = said(CSTATE, bare(), allow_reboot=True)
    assert isinstance(step, Step)
    assert (step.needs, step.actions[-1]) == ("reboot", Run(("update-grub",), 120.0))
    assert 'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX processor.max_cstate=1"' in step.wanted
    assert [kind for kind, _ in brief(done(CSTATE, bare(), allow_reboot=True))] == [Status.REBOOT]


def test_grubby_is_told_before_we_note_that_it_was() -> None:
    (step,) = said(CSTATE, bare(os={"id": "amzn", "family": "rhel"}), allow_reboot=True)
    assert isinstance(step, Step)
    told, note = step.actions
    assert told == Run(("grubby", "--update-kernel=ALL", "--args=processor.max_cstate=1"), 120.0)
    assert isinstance(note, Write)
    assert note.path == owned.KERNEL_ARGUMENTS


def test_a_file_whose_setting_was_turned_off_goes() -> None:
    there = after(bare(), [one for one in said(FILE, bare()) if isinstance(one, Step)])
    (step,) = planner("file")([], frozenset({FILE.id}), there, Request())
    assert isinstance(step, Step)
    assert step.actions == (Remove(owned.NEEDRESTART),)


def test_what_a_grubby_entry_no_longer_needs_is_taken_out() -> None:
    amzn = bare(os={"id": "amzn", "family": "rhel"})
    there = after(amzn, [one for one in said(CSTATE, amzn, allow_reboot=True) if isinstance(one, Step)])
    (step,) = planner("kernel-argument")([], frozenset({CSTATE.id}), there, Request(allow_reboot=True))
    assert isinstance(step, Step)
    told = Run(("grubby", "--update-kernel=ALL", "--remove-args=processor.max_cstate=1"), 120.0)
    assert step.actions == (told, Remove(owned.KERNEL_ARGUMENTS))


def test_grubby_keeps_what_is_not_asked_for() -> None:
    amzn = bare(os={"id": "amzn", "family": "rhel"})
    there = after(amzn, [one for one in said(CSTATE, amzn, allow_reboot=True) if isinstance(one, Step)])
    other = setting("kernel-argument", "intel_idle.max_cstate", "1")
    asked = Request(allow_reboot=True, only=(other.id,))
    (step,) = planner("kernel-argument")([other], frozenset({other.id}), there, asked)
    assert isinstance(step, Step)
    assert [one.command[2] for one in step.actions if isinstance(one, Run)] == [
        "--args=processor.max_cstate=1 intel_idle.max_cstate=1"
    ]
