"""A group of machines, and where they come from: the part of the configuration under `groups`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from infra.section import Name, Positive, Time, TypeName, ZoneId, id_of
from lustrain.cluster import Taint
from lustrain.schema import Section, like

CapacityMode = Literal["on-demand", "spot", "reservation", "capacity-block", "training-plan"]
GroupRole = Literal["worker", "controller", "login"]
DeepCheck = Literal["InstanceStress", "InstanceConnectivity"]
Patching = Literal["WhenIdle", "WhenAllIdle"]
"""Those of AWS::SageMaker::Cluster; the API also has DrainFirst, which Cloud Control's schema refuses."""
PlanArn = Annotated[
    str,
    like(
        r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]+:\d{12}:training-plan/.+",
        "the ARN of a training plan",
        "arn:aws:sagemaker:us-west-2:123456789012:training-plan/mine",
    ),
]


class Capacity(Section):
    """Where a group's machines come from."""

    mode: CapacityMode = "on-demand"
    reservation: Annotated[str, id_of("cr", "a capacity reservation")] | None = None
    """Id of an EC2 capacity reservation or capacity block. A block is bought by hand: paid at once and never refunded, and
    the AWS provider forgets that it paid (https://github.com/hashicorp/terraform-provider-aws/issues/46829)."""
    create: bool = False
    """`reservation` only: make a targeted one for `count` instances. It is billed from then on, protected and retained."""
    training_plan: PlanArn | None = None
    zone_id: ZoneId | None = None
    """Where the reservation, block or plan lies, if you know: compared with the group's zone before anything is made."""
    on_demand_base: Annotated[int, Field(ge=0)] = 0
    """`spot` on EC2 only: so many of `count` are always on demand. The others are spot or wait: nothing that spot does not give
    comes on demand in its place
    (https://docs.aws.amazon.com/autoscaling/ec2/userguide/mixed-instances-groups-set-up-overview.html)."""
    size: Positive | None = None
    """How many instances it holds, if you know."""
    placement_group: str | None = None
    """`reservation` only: name of the cluster placement group that the reservation was made in."""
    starts_at: Time | None = None
    """`capacity-block` only: when it begins (ISO 8601 with zone, in quotes), where that is still to come. The group is empty
    until then and filled by a scheduled action: Auto Scaling gives a group up that has failed to launch for about a day
    (https://docs.aws.amazon.com/autoscaling/ec2/userguide/launch-template-capacity-blocks.html)."""
    ends_at: Time | None = None
    """When the reservation, block or plan ends (ISO 8601 with zone, in quotes); set the trainer's `interrupt.deadline` to it,
    nothing hands it over. With `create` the reservation is made to end then."""

    @property
    def is_reserved(self) -> bool:
        """Whether the machines are set aside, and paid whether they run or not."""
        return self.mode not in ("on-demand", "spot")


class Group(Section):
    """Machines of one kind; with `hyperpod-eks` all are workers, with `ec2` all but logins beside a scheduler."""

    name: Name
    instance_type: Annotated[str, like(r"(ml\.)?[a-z0-9-]+\.[a-z0-9-]+", "an instance type", "p5.48xlarge")]
    """EC2's name (`p5.48xlarge`); HyperPod's `ml.` is added where it belongs."""
    other_types: tuple[TypeName, ...] = ()
    """EC2, spot: further types that a node may have, in the order of preference, where `instance_type` is not to be had. All
    are launched by one template, so they have as many accelerators, vCPUs and network cards, and are alike in more: rule
    EC2-024."""
    count: Annotated[int, Field(ge=0, le=6758)]
    """HyperPod's upper limit, from its API model."""
    min_count: Annotated[int, Field(ge=0)] | None = None
    """HyperPod: go on with this many when not all come. EC2 with a scheduler: 0 lets machines come when jobs wait for them and
    end when they have none, `count` at most. EC2 else: none; an Auto Scaling group keeps, and bills, what it got while it tries
    for the rest, and an alarm tells when some are missing for long."""
    role: GroupRole = "worker"
    zone_id: ZoneId | None = None
    """Another zone than the cluster's: a subnet is made there (HyperPod's `OverrideVpcConfig`). File systems stay in the
    cluster's zone, and EFA never leaves one: machines that train together share a zone."""
    capacity: Capacity = Capacity()
    image_id: Annotated[str, id_of("ami", "an image")] | None = None
    """The AMI. EC2's default: AWS's deep-learning base AMI for the type's architecture, as its SSM parameter resolves.
    HyperPod's: its own newest; another is its public AMI, or one built on that: unencrypted, of this account, one volume."""
    root_volume_gib: Annotated[int, Field(ge=100, le=16384)] = 500
    """EC2: the root disk. HyperPod fixes that one's size; there it is the EBS volume beside it, mounted at /opt/sagemaker."""
    volume_kms_key: str | None = None
    """ARN of the KMS key of a node's EBS volumes, the root disk too; default: EBS's own key of the account. With HyperPod it
    cannot be changed later (https://docs.aws.amazon.com/sagemaker/latest/dg/smcluster-cmk.html)."""
    interface_type: Literal["efa", "efa-only"] | None = None
    """HyperPod, types with EFA: `efa-only` takes no address of the subnet for each network card, `efa` one. Default: HyperPod's
    choice (https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_ClusterNetworkInterface.html)."""
    auto_patch: Patching | None = None
    """HyperPod: security patches of its AMI are put on, which replaces root disks: on each node once it is idle, or when all
    are. Default: never; you run `aws sagemaker update-cluster-software`."""
    threads_per_core: Literal[1, 2] = 1
    efa: bool | None = None
    """EC2: `false` attaches no EFA interfaces, for jobs that gain nothing from them: NCCL and Lustre go over TCP, and an image
    without EFA's driver will do. Default: all that the type has."""
    placement: Literal["cluster", "none"] | None = None
    """EC2, on demand and spot: `none` lets the nodes lie anywhere in the zone, where more machines are free, and farther apart.
    Default: in a cluster placement group of their own, where the type takes one
    (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/placement-strategies.html)."""
    partition: Name | None = None
    """Slurm partition; default: the group's name."""
    deep_health_checks: tuple[DeepCheck, ...] | None = None
    """HyperPod, groups with accelerators: run before a node joins, for 60 to 90 minutes that are billed
    (https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-autoscaling-nodeclass.html). Default: both; none for
    spot, whose nodes come and go, nor where Karpenter fills the group, which does not support them."""
    labels: Mapping[str, str] = {}
    taints: tuple[Taint, ...] = ()

    @property
    def slurm_partition(self) -> str:
        return self.partition or self.name

    @property
    def ec2_type(self) -> str:
        return self.instance_type.removeprefix("ml.")

    @property
    def ec2_types(self) -> tuple[str, ...]:
        """All types that a node may have, the preferred one first."""
        return (self.ec2_type, *self.other_types)

    def of_type(self, name: str) -> Group:
        """Return the group as it is where spot gives nodes of this type alone."""
        spot = self.capacity.model_copy(update={"on_demand_base": 0})
        return self.model_copy(update={"instance_type": name, "other_types": (), "capacity": spot})

    @property
    def hyperpod_type(self) -> str:
        return f"ml.{self.ec2_type}"
