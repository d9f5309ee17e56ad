"""Small faults that could be planted in the product: each is one expression, written differently."""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SWAPPED: Mapping[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True, order=True)
class Mutant:
    """One fault: `before` at that place of a file becomes `after`."""

    file: str
    line: int
    start: int
    end: int
    """Offsets into the file's bytes."""
    before: str
    after: str

    def applied(self, source: bytes) -> bytes:
        """Return the file with the fault in it."""
        return source[: self.start] + self.after.encode() + source[self.end :]


def mutants(file: str, source: bytes) -> list[Mutant]:
    """Every fault that could be planted in a file."""
    offsets = [0]
    for row in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(row))
    found = set()
    for node in _executed(ast.parse(source)):
        for changed in _changes(node):
            start = offsets[node.lineno - 1] + node.col_offset
            end = offsets[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            before = source[start:end].decode()
            found.add(Mutant(file, node.lineno, start, end, before, f"({ast.unparse(changed)})"))
    return sorted(found)


def draw(root: Path, rooms: Mapping[str, tuple[str, ...]], count: int, seed: int) -> list[Mutant]:
    """Draw `count` faults, as many in each room; `rooms` has for each the patterns of its files. The same for the same seed."""
    rng, drawn = random.Random(seed), list[Mutant]()
    for number, (_, patterns) in enumerate(sorted(rooms.items())):
        files = sorted({path for pattern in patterns for path in root.glob(pattern)})
        all_of_room = [one for path in files for one in mutants(str(path.relative_to(root)), path.read_bytes())]
        share = count // len(rooms) + (number < count % len(rooms))
        drawn += rng.sample(all_of_room, min(share, len(all_of_room)))
    return drawn


def _executed(node: ast.AST) -> Iterator[ast.expr]:
    """All expressions but annotations and f-strings, whose parts have no place of their own in every Python."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                if isinstance(child, ast.expr):
                    yield child
                yield from _executed(child)


def _changes(node: ast.expr) -> Iterator[ast.expr]:
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPPED:
            changed.ops = [SWAPPED[type(operator)]()]  # type: ignore[list-item]
            yield changed
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in SWAPPED and not _is_text(changed):
            changed.op = SWAPPED[type(operator)]()  # type: ignore[assignment]
            yield changed
        case ast.UnaryOp(op=ast.Not()):
            yield changed.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not changed.value)
        case ast.Constant(value=int()):
            yield ast.Constant(changed.value + 1)
        case ast.IfExp():
            changed.body, changed.orelse = changed.orelse, changed.body
            yield changed


def _is_text(node: ast.expr) -> bool:
    """Whether a sum is one of texts, which cannot be subtracted: that would be found by whatever runs it."""
    return any(
        isinstance(part, ast.JoinedStr) or isinstance(getattr(part, "value", None), str) for part in ast.walk(node)
    )
