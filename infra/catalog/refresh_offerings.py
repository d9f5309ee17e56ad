"""Write the snapshot of offerings anew:
`python -m infra.catalog.refresh_offerings us-east-1.json us-west-2.json … --source TEXT --date DAY`.

Each file is what `aws ec2 describe-instance-type-offerings --location-type availability-zone-id --region …` prints. Ask
every region that you use: a region without a file is unknown afterwards.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from infra.catalog.instances import snapshot
from infra.catalog.offerings import OFFERINGS


def render(offered: Iterable[Mapping[str, str]], source: str, date: str) -> str:
    """Return the whole snapshot as text: types of one family that lie in the same zones share a line. Types without EFA and
    accelerators are left out: where they are is no question."""
    asked: set[str] = set()
    zones: dict[str, set[str]] = defaultdict(set)
    for one in offered:
        asked.add(one["Location"])
        kind = snapshot().types.get(one["InstanceType"])
        if kind and (kind.efa or kind.accelerators):
            zones[kind.name].add(one["Location"])
    lines: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in sorted(zones):
        lines[name.partition(".")[0], *sorted(zones[name])].append(name)
    rows = [{"types": names, "zones": where} for (_, *where), names in lines.items()]
    head = {"source": source, "date": date, "asked": sorted(asked)}
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in (head, *rows))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m infra.catalog.refresh_offerings", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="answers of aws ec2 describe-instance-type-offerings")
    parser.add_argument("--source", required=True, help="where the answers came from, for the first line")
    parser.add_argument("--date", required=True, help="when, as YYYY-MM-DD")
    args = parser.parse_args(argv)
    answers = [json.loads(file.read_text(encoding="utf-8"))["InstanceTypeOfferings"] for file in args.files]
    OFFERINGS.write_text(
        render((one for answer in answers for one in answer), args.source, args.date), encoding="utf-8"
    )
    print(f"{OFFERINGS}: {sum(map(len, answers))} offerings of {len(answers)} regions")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
