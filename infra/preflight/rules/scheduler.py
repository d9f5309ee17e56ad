"""SLM: a Slurm of the stack's own, on EC2."""

from __future__ import annotations

from infra.config import CONTROLLER, ClusterSpec
from infra.finding import Problems, finding
from infra.plan.nodes.controller import accounting_secret
from infra.plan.nodes.machine import PATHS
from infra.plan.place import Arn
from infra.preflight.rule import Context, Family, groups, listed, named_images
from infra.preflight.rules.machine import has_idle_accelerators, has_no_image
from lustrain.cluster import other_slurmdbd

OURS = "infra/plan/nodes/controller.py"
CONF = "https://slurm.schedmd.com/slurm.conf.html"
CLIENTS = "https://docs.aws.amazon.com/fsx/latest/LustreGuide/install-lustre-client.html"
RESERVED = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-reservations-pricing-billing.html"
ACCOUNTING = "https://slurm.schedmd.com/accounting.html"
ENDPOINTS = "https://docs.aws.amazon.com/secretsmanager/latest/userguide/vpc-endpoint-overview.html"
KERNEL_WITHOUT_CLIENT = "7.0"
"""Of Ubuntu 24.04's images since September 2026
(https://docs.aws.amazon.com/dlami/latest/devguide/aws-deep-learning-ami-gpubaseoss-ul2404-2026-09-16.html).
AWS builds a client for each kernel (CLIENTS); the newest for 24.04 that we know of is for 6.17, looked for again on 27
November 2026."""
TAKEN = {
    CONTROLLER: "the group of Slurm's controller",
    "default": "a word of slurm.conf",
    "all": "a word of slurm.conf",
}
"""Names with a meaning of their own beside those of groups and partitions (CONF: PartitionName, Nodes)."""
OF_WORKERS = ("efa", "placement")
"""Keys of a group that do nothing on a login, where no rank runs."""
RULES = Family()


@RULES.add("SLM-001", "A scheduler of the stack's own comes with backend ec2 only.", OURS)
def backend(spec: ClusterSpec, context: Context) -> Problems:
    if spec.scheduler and spec.hyperpod:
        own = "which has a Slurm already" if spec.backend == "hyperpod-slurm" else "where Kubernetes schedules"
        yield finding(
            "scheduler", f"has no effect with backend {spec.backend}, {own}", "remove it, or take backend: ec2"
        )


@RULES.add(
    "SLM-002", "Groups and partitions have none of the names that Slurm or its controller takes.", CONF, essential=True
)
def names(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec) if spec.controller else ():
        for key, name in {"name": group.name, "partition": group.partition}.items():
            if name in TAKEN:
                yield finding(f"{path}.{key}", f"{name} is {TAKEN[name]}", "take another name")


@RULES.add("SLM-003", "The controller runs Linux on a processor that there is an image for.", OURS, essential=True)
def architecture(spec: ClusterSpec, context: Context) -> Problems:
    return has_no_image(spec, spec.controller)


@RULES.add("SLM-004", "The controller has no accelerators: it runs no jobs.", OURS, judgement=True)
def idle_accelerators(spec: ClusterSpec, context: Context) -> Problems:
    return has_idle_accelerators(spec, spec.controller)


@RULES.add(
    "SLM-005",
    "In a closed network, images bring Slurm themselves: nodes install it from Ubuntu's archive.",
    OURS,
    judgement=True,
)
def nowhere_to_install_from(spec: ClusterSpec, context: Context) -> Problems:
    accounting = spec.scheduler.accounting if spec.scheduler else None
    records = ["slurmdbd", *([] if accounting.database else ["mariadb-server"])] if accounting else []
    for path, image_id in named_images(spec).items() if spec.controller and spec.network.closed else ():
        if image_id is None:
            message = "the default image has no Slurm, and a closed network nothing to install it from"
            programs = listed(["slurm-wlm", "munge", *(records if path.startswith(PATHS[CONTROLLER]) else [])])
            yield finding(path, message, f"name an image with {programs} in it, of Slurm 22.05 or newer")


@RULES.add("SLM-006", "With Lustre, images bring a client for their kernel.", CLIENTS, judgement=True)
def no_lustre_client(spec: ClusterSpec, context: Context) -> Problems:
    for path, image_id in named_images(spec).items() if spec.controller and spec.storage.lustre else ():
        if image_id is None:
            message = (
                f"default images of Ubuntu 24.04 run kernel {KERNEL_WITHOUT_CLIENT}, for which no Lustre client of AWS "
                "is known: boots would fail"
            )
            fix = "name an image with a client, and Slurm 22.05 or newer, or suppress this once AWS has one"
            yield finding(path, message, fix)


@RULES.add(
    "SLM-007",
    "A group that goes to zero is on demand or spot: other capacity is paid whether its machines are there or not.",
    RESERVED,
    judgement=True,
)
def paid_at_zero(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        if spec.goes_to_zero(group) and group.capacity.is_reserved:
            message = f"a {group.capacity.mode} is paid while its machines are away, and none may come back into it"
            yield finding(f"{path}.min_count", message, "remove it, or take capacity.mode on-demand or spot")


@RULES.add("SLM-008", "idle_minutes has an effect: a group goes to zero.", OURS, judgement=True)
def idle_without_effect(spec: ClusterSpec, context: Context) -> Problems:
    named = spec.scheduler is not None and "idle_minutes" in spec.scheduler.model_fields_set
    if named and spec.controller and not any(spec.goes_to_zero(group) for group in spec.groups):
        message = "has no effect: no group has min_count: 0, and machines of the others never end"
        yield finding(
            "scheduler.idle_minutes", message, "set min_count: 0 where machines shall come with jobs, or remove it"
        )


@RULES.add("SLM-009", "Login machines are on demand, and have only keys that do something there.", OURS, judgement=True)
def odd_login(spec: ClusterSpec, context: Context) -> Problems:
    for path, group in groups(spec):
        if not spec.is_login(group):
            continue
        if group.capacity.is_reserved:
            message = f"a {group.capacity.mode} is bought for nodes that compute, and a login would take one of them"
            yield finding(f"{path}.capacity.mode", message, "set mode: on-demand")
        for key in OF_WORKERS:
            if key in group.model_fields_set:
                yield finding(f"{path}.{key}", "does nothing on a login: no rank runs there", "remove it")


@RULES.add("SLM-010", "With accounting, settings name no other slurmdbd.", CONF, essential=True)
def two_slurmdbds(spec: ClusterSpec, context: Context) -> Problems:
    scheduler = spec.scheduler
    if scheduler is None or not scheduler.accounting or not spec.controller:
        return
    if key := other_slurmdbd(scheduler.settings):
        message = "accounting makes a slurmdbd on the controller, and this names another"
        yield finding(f"scheduler.settings.{key}", message, "remove it, or accounting")


@RULES.add(
    "SLM-011",
    "account, qos and AccountingStorageEnforce have an effect: there is accounting.",
    ACCOUNTING,
    level="warning",
)
def accounts_without_accounting(spec: ClusterSpec, context: Context) -> Problems:
    scheduler = spec.scheduler
    if scheduler is None or not spec.controller or scheduler.accounting or other_slurmdbd(scheduler.settings):
        return
    enforced = [key for key in scheduler.settings if key.lower() == "accountingstorageenforce"]
    keys = [key for key in ("account", "qos") if getattr(scheduler, key)]
    for path in [*keys, *(f"settings.{key}" for key in enforced)]:
        message = "has no effect: nothing keeps accounts or records of jobs"
        yield finding(f"scheduler.{path}", message, "set scheduler.accounting: {}, or remove it")


@RULES.add(
    "SLM-012",
    "In a closed network, the secret of the accounting database is of the cluster's region, whose endpoint there is.",
    ENDPOINTS,
)
def secret_elsewhere(spec: ClusterSpec, context: Context) -> Problems:
    arn = accounting_secret(spec)
    if arn is None or not spec.network.closed or context.region is None:
        return
    if (there := Arn.parse(arn).region) != context.region:
        message = f"the secret is in {there}, which a closed network does not reach"
        path = "scheduler.accounting.database.secret_arn"
        yield finding(path, message, f"replicate it to {context.region} and name that one")
