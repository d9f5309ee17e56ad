"""Prometheus's text format, version 0.0.4 (https://prometheus.io/docs/instrumenting/exposition_formats/). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Union

Number = Union[int, float]
GAUGE, COUNTER = "gauge", "counter"


class Sample(NamedTuple):
    """This is one value; its labels tell it from the others of its metric."""

    value: Number
    labels: Mapping[str, str] = {}


class Metric(NamedTuple):
    """This is one metric; one without samples is not written."""

    name: str
    kind: str
    text: str
    samples: Sequence[Sample]


def render(metrics: Iterable[Metric]) -> str:
    """Return the text of all metrics; a name that comes twice is a ValueError, as the collector would drop the file."""
    lines: list[str] = []
    names: set[str] = set()
    for metric in metrics:
        if not metric.samples:
            continue
        if metric.name in names:
            raise ValueError(f"{metric.name} comes twice")
        names.add(metric.name)
        lines += [f"# HELP {metric.name} {metric.text}", f"# TYPE {metric.name} {metric.kind}"]
        lines += [f"{metric.name}{_labels(sample.labels)} {sample.value!r}" for sample in metric.samples]
    return "".join(f"{line}\n" for line in lines)


def _labels(labels: Mapping[str, str]) -> str:
    pairs = [f'{name}="{_escaped(value)}"' for name, value in labels.items()]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
