"""Each plain kind: facts in, steps and remarks out; what is in place makes no step."""

from __future__ import annotations

from typing import Any

import pytest

from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.kinds import planner
from node_setup.agent.kinds.agent import UNIT
from node_setup.agent.kinds.hold import LOCKED
from node_setup.agent.model import PERSISTED, RUNTIME, Put, Remark, Remove, Request, Run, Setting, Step, Write
from node_setup.agent.owned import HEADER
from node_setup.agent.settings.catalog import load
from tests.node_setup.kinds_facts import applied, bare, remark, service, steps

NO_SYSTEMD = {"init": "other", "services": {}}
READ_ONLY = {"disk": {"/": {"read_only": False}, "/etc": {"read_only": True}}}
AMZN = {"os": {"id": "amzn", "family": "rhel"}}
Said = list[Step | Remark]


def setting(kind: str, key: str = "", value: str = "", **more: Any) -> Setting:
    return Setting(f"{kind}.{key or 'x'}", kind, ("cpu",), "because", "here", key, value, **more)


def said(one: Setting, facts: dict[str, Any], **request: Any) -> Said:
    return planner(one.kind)([one], frozenset({one.id}), facts, Request(**request))


def brief(lines: Said) -> list[tuple[str, str | None]]:
    """(part or status, found) of each."""
    return [(one.part if isinstance(one, Step) else one.status, one.current) for one in lines]


def tuned(one: Setting, facts: dict[str, Any], **request: Any) -> dict[str, Any]:
    return applied(facts, steps(said(one, facts, **request)))


def only(lines: Said) -> Step:
    """The only thing that was said, which changes something."""
    [one] = lines
    assert isinstance(one, Step), one
    return one


MAPS = setting("sysctl", "vm.max_map_count", "524288", compare="at-least")
RATIO = setting("sysctl", "vm.dirty_ratio", "5")
RMEM = setting("sysctl", "net.ipv4.tcp_rmem", "8192 87380 16777216", compare="at-least")
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
    ("there, other loader", CSTATE, {"os": {}, "kernel__cmdline": {"processor.max_cstate": "1"}}, [(Status.OK, "1")]),
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
    assert remark(said(one, tuned(one, bare()))).status == Status.OK


RELOAD = Run(("systemctl", "daemon-reload"))
GRUB = 'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX processor.max_cstate=1"'
GRUBBY = ("grubby", "--update-kernel=ALL")
LIMITS = "".join(f"{who} {kind} memlock unlimited\n" for who in ("*", "root") for kind in ("soft", "hard"))
SOURCE = f"# {CLOCK.id}\nserver 169.254.169.123 prefer iburst\n"
CHRONYC = Run(("chronyc", "reload", "sources"), 10.0)
AL_FOLDER = {**AMZN, "time__folders": ["/etc/chrony.d"]}
ACTIONS: list[tuple[Setting, dict[str, Any], tuple[Any, ...]]] = [
    (UVM, {"modules__loaded": ["nvidia_uvm"]}, (Write(owned.MODULES_LOAD, f"{HEADER}# {UVM.id}\nnvidia-uvm\n"),)),
    (CREDITS, {}, (Write(owned.MODPROBE, f"{HEADER}# {CREDITS.id}\noptions ksocklnd credits=2560\n"),)),
    (MEMLOCK, {}, (Write(owned.LIMITS, f"{HEADER}# {MEMLOCK.id}\n{LIMITS}"),)),
    (SLURMD, {}, (Write(owned.SLURMD, f"{HEADER}[Service]\n# {SLURMD.id}\nLimitMEMLOCK=infinity\n"), RELOAD)),
    (FILE, {}, (Write(owned.NEEDRESTART, f"{HEADER}# {FILE.id}\na\nb\n"), RELOAD)),
    (CLOCK, {}, (Write(owned.CHRONY, HEADER + SOURCE), CHRONYC)),
    (CLOCK, AL_FOLDER, (Write(owned.CHRONY_AL, HEADER + SOURCE), CHRONYC)),
    (HOLD, {"packages__held": ["linux-aws"]}, (Run(("apt-mark", "hold", "lustre-client-modules-aws"), busy=LOCKED),)),
    (CSTATE, {}, (Write(owned.GRUB, f"{HEADER}# {CSTATE.id}\n{GRUB}\n"), Run(("update-grub",), 120.0))),
    (
        CSTATE,
        AMZN,
        (
            Run((*GRUBBY, "--args=processor.max_cstate=1"), 120.0),
            Write(owned.KERNEL_ARGUMENTS, f"{HEADER}# {CSTATE.id}\nprocessor.max_cstate=1\n"),
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("one", "changes", "actions"), ACTIONS)
def test_what_is_written_and_what_makes_the_system_take_it_in(
    one: Setting, changes: dict[str, Any], actions: tuple[Any, ...]
) -> None:
    assert only(said(one, bare(**changes), allow_reboot=True)).actions == actions


@pytest.mark.parametrize("one", [CREDITS, SLURMD, NOFILE, CSTATE], ids=lambda one: one.id)
def test_what_was_loaded_before_or_started_under_a_job_waits(one: Setting) -> None:
    assert only(said(one, bare(), allow_reboot=True)).needs in ("reboot", "restart of slurmd")
    again = said(one, tuned(one, bare(), allow_reboot=True), allow_reboot=True)
    assert remark(again).status == Status.REBOOT


def test_idle_slurmd_is_restarted_except_during_the_boot_unit() -> None:
    facts = bare(jobs=[])
    facts["services"][UNIT] = service("loaded", "activating", "enabled", "success")
    assert only(said(SLURMD, facts)).needs == "restart of slurmd"
    facts["services"][UNIT]["active"] = "active"
    on_disk, running = steps(said(SLURMD, facts))
    assert (on_disk.needs, on_disk.actions[-1]) == ("", RELOAD)
    assert running.actions == (Run(("systemctl", "restart", "slurmd.service")),)


@pytest.mark.parametrize("one", [CREDITS, SLURMD])
def test_what_is_not_running_yet_needs_nothing(one: Setting) -> None:
    facts = bare(modules__parameters={}, limits__slurmd=None)
    assert only(said(one, facts)).needs == ""
    assert remark(said(one, tuned(one, facts))).status == Status.OK


def test_every_kind_leaves_alone_what_is_not_selected() -> None:
    for one in (MAPS, UVM, CREDITS, MEMLOCK, SLURMD, FILE, HOLD, CSTATE, CHRONY, CLOCK, THP):
        assert planner(one.kind)([one], frozenset(), bare(), Request(only=("other",))) == []


def sysctl(path: str, value: str) -> dict[str, Any]:
    return {"sysctl_files": [{"path": path, "values": {"vm.max_map_count": value}}]}


def modprobe(path: str, value: str) -> dict[str, Any]:
    return {"modules__files": [{"path": f"/etc/modprobe.d/{path}", "options": {"ksocklnd": {"credits": value}}}]}


def limits(path: str, line: str) -> dict[str, Any]:
    return {"limits__files": [{"path": f"/etc/security/{path}", "lines": [line.split()]}]}


@pytest.mark.parametrize(
    ("one", "others", "found"),
    [
        (MAPS, sysctl("/usr/lib/sysctl.d/10-map-count.conf", "65530"), None),
        (MAPS, sysctl("/etc/sysctl.d/99-sysctl.conf", "65530"), "65530"),
        (MAPS, sysctl("/run/sysctl.d/95-later.conf", "65530"), "65530"),
        (MAPS, sysctl("/run/sysctl.d/95-later.conf", "600000"), None),
        (MAPS, sysctl("/etc/sysctl.conf", "65530"), "65530"),
        (CREDITS, modprobe("zz.conf", "256"), "256"),
        (CREDITS, modprobe("zz.conf", "4096"), None),
        (CREDITS, modprobe("aa.conf", "256"), None),
        (MEMLOCK, limits("limits.conf", "* hard memlock 64"), None),
        (MEMLOCK, limits("limits.conf", "@users hard memlock 64"), "64"),
        (MEMLOCK, limits("limits.conf", "@users hard memlock -1"), None),
        (MEMLOCK, limits("limits.conf", "@users hard nofile 64"), None),
        (MEMLOCK, limits("limits.d/10-x.conf", "* - memlock 64"), None),
        (MEMLOCK, limits("limits.d/99-x.conf", "* - memlock 64"), "64"),
    ],
)
def test_only_a_winning_unsatisfying_line_is_a_conflict(
    one: Setting, others: dict[str, Any], found: str | None
) -> None:
    for facts in (bare(**others), tuned(one, bare(**others))):
        assert dict(brief(said(one, facts))).get(Status.CONFLICT) == found


def test_lines_of_ours_go_once_aws_owns_the_options() -> None:
    there = tuned(CREDITS, bare())
    there["modules"]["aws_lustre_block"] = True
    assert [one.actions for one in steps(said(CREDITS, there))] == [(Remove(owned.MODPROBE),)]


def test_driver_packages_are_held_but_not_container_toolkit() -> None:
    names = ("headless-550-server", "utils-550-server", "kernel-common-550-server", "driver-550", "fabricmanager-550",
             "dkms-550-server-open")  # fmt: skip
    driver = [*(f"nvidia-{name}" for name in names), "libnvidia-compute-550-server", "libnvidia-nscq-550"]
    others = ["libnvidia-container1", "libnvidia-container-tools", "nvidia-container-toolkit", "nvidia-settings"]
    (hold,) = (one for one in load() if one.id == "hold.nvidia-driver")
    step = only(said(hold, bare(packages__installed=dict.fromkeys([*driver, *others], "550"))))
    assert step.wanted.split(", ") == sorted(driver)


def test_a_source_that_chrony_no_longer_reads_is_a_conflict() -> None:
    there = tuned(CLOCK, bare())
    there["time"]["folders"] = ["/run/chrony-dhcp"]
    assert remark(said(CLOCK, there)).status == Status.CONFLICT


@pytest.mark.parametrize(("backend", "told"), [("hyperpod-slurm", True), ("machines", False)])
def test_module_loaded_first_by_hyperpod_needs_a_reboot(backend: str, told: bool) -> None:
    why = remark(said(CREDITS, tuned(CREDITS, bare()), document={"backend": backend})).why
    assert ("each node that it brings needs a reboot" in why) is told


def test_a_file_whose_setting_was_turned_off_goes() -> None:
    found = planner("file")([], frozenset({FILE.id}), tuned(FILE, bare()), Request())
    step = only(found)
    assert (step.current, step.wanted, step.actions) == ("a; b", "no line", (Remove(owned.NEEDRESTART),))


def test_grubby_removes_unwanted_and_keeps_foreign_arguments() -> None:
    there = tuned(CSTATE, bare(**AMZN), allow_reboot=True)
    gone = planner("kernel-argument")([], frozenset({CSTATE.id}), there, Request(allow_reboot=True))
    told = Run((*GRUBBY, "--remove-args=processor.max_cstate=1"), 120.0)
    assert only(gone).actions == (told, Remove(owned.KERNEL_ARGUMENTS))
    other = setting("kernel-argument", "intel_idle.max_cstate", "1")
    asked = Request(allow_reboot=True, only=(other.id,))
    kept = only(planner("kernel-argument")([other], frozenset({other.id}), there, asked))
    assert kept.actions[0] == Run((*GRUBBY, "--args=processor.max_cstate=1 intel_idle.max_cstate=1"), 120.0)


DROPPED = pytest.mark.parametrize(("kind", "path"), [("scheduler", owned.UDEV), ("gpu-clocks", owned.CLOCKS_UNIT)])


def unwanted(kind: str, path: str, only: tuple[str, ...] = (), **more: Any) -> Said:
    """What a kind says of its file where no setting wants it."""
    facts = {"files": {path: {"content": "x", "mode": "0644"}}, **more}
    return planner(kind)([], frozenset(), facts, Request(only=only))


@DROPPED
def test_unwanted_file_is_removed_after_its_unit_is_disabled(kind: str, path: str) -> None:
    actions = only(unwanted(kind, path)).actions
    disable = Run(("systemctl", "disable", "lustrain-gpu-clocks.service"))
    assert actions == ((disable, Remove(path), RELOAD) if path == owned.CLOCKS_UNIT else (Remove(path),))


@DROPPED
def test_file_stays_when_only_some_settings_are_selected(kind: str, path: str) -> None:
    assert unwanted(kind, path, only=("sysctl.*",)) == []
    assert unwanted(kind, path, files={path: None}) == []
    assert remark(unwanted(kind, path, disk={"/etc": {"read_only": True}})).status == "failed"


@pytest.mark.parametrize("path", ["/usr/lib/sysctl.d/10-map-count.conf", "/etc/sysctl.d/99-sysctl.conf"])
def test_owned_file_does_not_lower_another_files_value(path: str) -> None:
    wanted = [step.wanted for step in steps(said(MAPS, bare(**sysctl(path, "1048576"))))]
    assert wanted == ["524288", "vm.max_map_count = 1048576"]


def test_owned_file_does_not_lower_the_kernel_default() -> None:
    assert only(said(MAPS, bare(sysctl={"vm.max_map_count": "1048576"}))).wanted == "vm.max_map_count = 1048576"


def test_fields_are_raised_one_by_one() -> None:
    step = steps(said(RMEM, bare(sysctl={"net.ipv4.tcp_rmem": "4096 131072 6291456"})))[0]
    assert step.actions == (Put("/proc/sys/net/ipv4/tcp_rmem", "8192 131072 16777216"),)


MAPS_LINE, RATIO_LINE = f"# {MAPS.id}\nvm.max_map_count = 524288\n", f"# {RATIO.id}\nvm.dirty_ratio = 5\n"
OTHER_RATIO = RATIO_LINE.replace("5", "40")
RETIRED = "# sysctl.retired\nvm.x = 1\n"
BOTH = Write(owned.SYSCTL, HEADER + RATIO_LINE + MAPS_LINE)
ALONE = Write(owned.SYSCTL, HEADER + MAPS_LINE)


def persisted(
    chosen: list[Setting], selected: list[Setting], lines: str | None, only: tuple[str, ...] = (), mode: str = "0644"
) -> list[tuple[Any, ...]]:
    """Who changes our file that holds these lines, and how, where the kernel has all values."""
    files = {**dict.fromkeys(owned.PATHS), owned.SYSCTL: None if lines is None else {"content": lines, "mode": mode}}
    facts = bare(files=files, sysctl={"vm.max_map_count": "524288", "vm.dirty_ratio": "5"})
    planned = steps(planner("sysctl")(chosen, frozenset(one.id for one in selected), facts, Request(only=only)))
    return [(step.setting, *step.actions) for step in planned]


def test_each_step_writes_the_same_sorted_file() -> None:
    assert persisted([RATIO, MAPS], [RATIO, MAPS], None) == [(RATIO.id, BOTH), (MAPS.id, BOTH)]


def test_unwanted_lines_and_empty_files_are_removed() -> None:
    assert persisted([MAPS], [MAPS, RATIO], HEADER + MAPS_LINE + RATIO_LINE) == [(RATIO.id, ALONE)]
    assert persisted([], [RATIO], HEADER + RATIO_LINE) == [(RATIO.id, Remove(owned.SYSCTL))]
    assert persisted([MAPS], [MAPS], HEADER + RETIRED + MAPS_LINE) == [("sysctl.retired", ALONE)]


def test_lines_of_unselected_settings_stay() -> None:
    assert persisted([MAPS], [MAPS], HEADER + RETIRED + MAPS_LINE, (MAPS.id,)) == []
    kept = Write(owned.SYSCTL, HEADER + OTHER_RATIO + MAPS_LINE)
    assert persisted([MAPS, RATIO], [MAPS], HEADER + OTHER_RATIO, (MAPS.id,)) == [(MAPS.id, kept)]


@pytest.mark.parametrize(
    ("lines", "mode"),
    [
        (f"{HEADER}{MAPS_LINE}vm.swappiness = 0\n", "0644"),
        (f"{HEADER}vm.swappiness = 0\n{MAPS_LINE}", "0644"),
        (HEADER + MAPS_LINE + MAPS_LINE, "0644"),
        (HEADER + MAPS_LINE, "0600"),
        (MAPS_LINE, "0644"),
    ],
)
def test_anything_else_in_our_file_or_another_mode_is_put_right(lines: str, mode: str) -> None:
    assert persisted([MAPS], [MAPS], lines, mode=mode) == [(MAPS.id, ALONE)]
