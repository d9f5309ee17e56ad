"""Arguments of the kernel's command line: reported, and given to the boot loader only where a reboot is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from lustrain.status import Status
from node_setup.agent import owned
from node_setup.agent.kinds.compare import satisfies
from node_setup.agent.kinds.files.owned_lines import OwnedLines
from node_setup.agent.kinds.verdict import with_ok
from node_setup.agent.model import Action, Facts, Remark, Request, Run, Setting, Step

UPDATE_S = 120.0
"""update-grub looks at every disk, grubby rewrites every entry."""


def plan(chosen: Sequence[Setting], selected: frozenset[str], facts: Facts, request: Request) -> list[Step | Remark]:
    given = (facts.get("kernel") or {}).get("cmdline")
    settings = [setting for setting in chosen if setting.id in selected]
    if given is None:
        return [
            Remark(setting.id, Status.UNKNOWN, "the kernel's command line could not be read") for setting in settings
        ]
    missing = [
        setting for setting in chosen if not satisfies(str(given.get(setting.key, "")), setting.value, setting.compare)
    ]
    file = _file(facts)
    planned = _by_file(file, chosen, missing, selected, facts, request) if file else []
    lines = file.lines(facts) if file else {}
    how = "--allow-reboot gives it to the boot loader" if file else "the boot loader of this distribution is not known"
    stepped = {line.setting for line in planned}
    quiet = [setting for setting in missing if setting.id in selected and setting.id not in stepped]
    planned += [_waits(setting, given) if setting.id in lines else _report(setting, given, how) for setting in quiet]
    return with_ok(planned, chosen, selected, {setting.id: given.get(setting.key) for setting in chosen})


def _by_file(
    file: OwnedLines,
    chosen: Sequence[Setting],
    missing: Sequence[Setting],
    selected: frozenset[str],
    facts: Facts,
    request: Request,
) -> list[Step | Remark]:
    """Plan the boot loader's file. An argument of the image is not given a second time; what we once gave stays given."""
    if not request.allow_reboot:
        return []
    lines = file.lines(facts)
    wanted = {setting.id: _line(file, setting) for setting in chosen if setting in missing or setting.id in lines}
    target = file.target(wanted, selected, facts, request)
    return _with_boot_loader(file, lines, target).plan(wanted, selected, facts, request)


def _file(facts: Facts) -> OwnedLines | None:
    family = (facts.get("os") or {}).get("family")
    return {"debian": OwnedLines(owned.GRUB), "rhel": OwnedLines(owned.KERNEL_ARGUMENTS)}.get(str(family))


def _argument(setting: Setting) -> str:
    return f"{setting.key}={setting.value}"


def _line(file: OwnedLines, setting: Setting) -> str:
    argument = _argument(setting)
    return f'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX {argument}"' if file.path == owned.GRUB else argument


def _with_boot_loader(file: OwnedLines, now: Mapping[str, str], target: Mapping[str, str]) -> OwnedLines:
    """Return the file with the programs that update the boot loader, and the reboot that each change waits for."""
    needs = dict.fromkeys({**now, **target}, "reboot")
    if file.path == owned.GRUB:
        return OwnedLines(file.path, after=(Run(("update-grub",), UPDATE_S),), needs=needs)
    gone = [line for line in now.values() if line not in target.values()]
    return OwnedLines(file.path, before=tuple(_grubby(target.values(), gone)), needs=needs)


def _grubby(arguments: Iterable[str], gone: Iterable[str]) -> Iterator[Action]:
    for flag, texts in (("--remove-args", " ".join(gone)), ("--args", " ".join(arguments))):
        if texts:
            yield Run(("grubby", "--update-kernel=ALL", f"{flag}={texts}"), UPDATE_S)


def _report(setting: Setting, given: Mapping[str, str], how: str) -> Remark:
    why = f"the kernel was not booted with {_argument(setting)}; reported only: {how}"
    return Remark(setting.id, Status.SKIPPED, why, given.get(setting.key), setting.value)


def _waits(setting: Setting, given: Mapping[str, str]) -> Remark:
    why = f"the boot loader has {_argument(setting)}, which counts from the next boot on"
    return Remark(setting.id, Status.REBOOT, why, given.get(setting.key), setting.value)
