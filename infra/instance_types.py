"""Instance types that the catalogue does not know, described by hand: the part of the configuration under `instance_types`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from infra.catalog.instances import Accelerator, Card, Instance
from infra.section import Positive
from lustrain.schema import Section

USAGE = frozenset({"on-demand", "spot", "capacity-block"})
PLACEMENT = frozenset({"cluster"})
"""How new hardware is sold and placed is not known here; AWS refuses what it does not offer."""


class Accelerators(Section):
    """GPUs or Neuron devices of one node."""

    name: str
    """Manufacturer and name. One that begins with `NVIDIA` gets AWS's image for NVIDIA GPUs."""
    count: Positive
    memory_gib: Positive
    """Of one device."""
    kind: Literal["gpu", "neuron"] = "gpu"


class NetworkCards(Section):
    """Network cards of one kind."""

    count: Positive = 1
    interfaces: Positive = 2
    """`MaximumNetworkInterfaces` of each."""
    types: tuple[Literal["interface", "efa", "efa-only"], ...] = ("interface",)
    """`InterfaceTypes` of each."""


class InstanceType(Section):
    """What `aws ec2 describe-instance-types --instance-types …` says of a type."""

    architecture: Literal["x86_64", "arm64"]
    vcpus: Positive
    memory_gib: Positive
    threads_per_core: Literal[1, 2] = 1
    """With 2 a group runs one thread a core unless its own `threads_per_core` is 2; with 1 no CPU options are set."""
    accelerators: Accelerators | None = None
    nvme: Annotated[int, Field(ge=0)] = 0
    """Local NVMe drives."""
    efa: Annotated[int, Field(ge=0)] = 0
    """`MaximumEfaInterfaces`."""
    network_cards: Annotated[tuple[NetworkCards, ...], Field(min_length=1)] = (NetworkCards(),)
    """In the order of their index; the first is the primary one."""

    def instance(self, name: str) -> Instance:
        """Return the facts as the catalogue would have them."""
        kinds = [cards for cards in self.network_cards for _ in range(cards.count)]
        has = self.accelerators
        return Instance(
            name=name,
            architecture=self.architecture,
            vcpus=self.vcpus,
            threads_per_core=self.threads_per_core,
            memory_mib=self.memory_gib * 1024,
            accelerators=(Accelerator(has.kind, has.name, has.count, has.memory_gib * 1024),) if has else (),
            nvme_count=self.nvme,
            nvme_gb=0,
            usage=USAGE,
            placement=PLACEMENT,
            efa=self.efa,
            primary_card=0,
            cards=tuple(Card(at, kind.interfaces, frozenset(kind.types)) for at, kind in enumerate(kinds)),
        )
