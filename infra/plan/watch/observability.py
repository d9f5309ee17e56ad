"""A cluster's logs, alarms and dashboard as data; an id that exists only after `up` is named by its subject.

A subject is what an alarm watches: `cluster`, `lustre`, `home`, `nat`, `queue`, `dead letters`, `controller`, `monitor`,
or `group:<name>` for a group's Auto Scaling group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from infra.config import LOGIN, ClusterSpec, Group
from infra.plan.nodes.logs import LogGroupPlan, carries_logs, log_groups
from infra.plan.place import Place, bucket_names
from infra.plan.storage.lustre import lustre_plan
from infra.plan.watch.interruptions import dead_letters_name, queue_name, topic_name
from infra.plan.watch.monitor import alert_manager, rule_groups
from node_setup.agent.slurm.scaling import BOOTED_WITHIN_S

LOG_DAYS = (1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3288, 3653)
"""The retention that CloudWatch Logs knows
(https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_PutRetentionPolicy.html)."""
GIB = 1024**3
MINUTE = 60
HOUR = 3600
GANG_MINUTES = 15
"""A node group may take this long to come together before somebody should look."""
MACHINE_MINUTES = 10
"""EC2's own recovery takes less, and so does the boot of a new controller or monitor."""
UNREAD_MINUTES = 10
"""A notice that lay this long was not read: a spot notice gives two minutes."""
COUNTED_GROUPS = 9
"""CloudWatch evaluates an alarm over at most ten metrics
(https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/cloudwatch_limits.html)."""
HOME_FULL_PERCENT = 85
BOOT_NAMESPACE, BOOT_FAILED = "Lustrain", "FirstBootFailed"
"""What boot_steps.sh counts, in a namespace that the node role may write to."""
STALLED_MINUTES = 3
"""A single late line is no alarm."""
HYPERPOD_NAMESPACE = "/aws/sagemaker/Clusters"
"""Where HyperPod nodes may put metrics, as the managed policy of their role allows."""

Comparison = Literal["LessThanThreshold", "GreaterThanThreshold"]
Missing = Literal["breaching", "notBreaching", "missing"]


@dataclass(frozen=True)
class Metric:
    """One statistic over one period (seconds) of one metric; `dimension` names the alarm's subject, or another `subject`."""

    id: str
    namespace: str
    name: str
    statistic: Literal["Minimum", "Maximum", "Sum", "Average", "SampleCount"]
    dimension: str
    period: int = MINUTE
    subject: str | None = None


@dataclass(frozen=True)
class Alarm:
    """Fires when `expression` over `metrics` compares so with `threshold` for `periods` periods in a row.

    `{id}` in the description stands for the subject's id, which is not known before `up`. `mails_end`: the end of it is
    news too.
    """

    name: str
    subject: str
    description: str
    metrics: tuple[Metric, ...]
    expression: str
    label: str
    comparison: Comparison = "GreaterThanThreshold"
    threshold: float = 0
    periods: int = 1
    missing: Missing = "notBreaching"
    mails_end: bool = True

    @property
    def subjects(self) -> frozenset[str]:
        """All that must be there for this alarm."""
        return frozenset({self.subject, *(metric.subject for metric in self.metrics if metric.subject)})


@dataclass(frozen=True)
class WorkspacePlan:
    """A workspace of Amazon Managed Service for Prometheus. `rules` and `alert_manager` are YAML, empty where AWS's add-on for
    EKS scrapes: it gives other labels than the rules go by."""

    alias: str
    rules: str = ""
    alert_manager: str = ""


@dataclass(frozen=True)
class ObservabilityPlan:
    """`groups` names the subjects of the Auto Scaling groups in the order of the spec's groups."""

    name: str
    board: str
    """Name of the dashboard: dashboards belong to the account, not to a region, and a second one of a name overwrites the
    first (https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/API_PutDashboard.html)."""
    region: str
    log_groups: tuple[LogGroupPlan, ...]
    log_days: int
    alarms: tuple[Alarm, ...]
    alarm_arns: tuple[str, ...]
    groups: tuple[str, ...]
    queue: str
    dead_letters: str
    buckets: tuple[str, ...]
    hyperpod: bool
    dashboard: bool
    workspace: WorkspacePlan | None


def observability(spec: ClusterSpec, place: Place) -> ObservabilityPlan:
    groups = () if spec.hyperpod else tuple(f"group:{group.name}" for group in spec.groups)
    alarms = (
        *_lustre_alarms(spec),
        *_home_alarms(spec),
        *(_incomplete_group_alarm(spec, group) for group in spec.groups if not spec.hyperpod),
        *([] if spec.hyperpod and spec.monitor is None else [_boot_alarm(spec)]),
        *([_stalled_alarm(spec)] if carries_logs(spec) else []),
        *([_controller_alarm(spec)] if spec.controller else []),
        *([_monitor_alarm(spec)] if spec.monitor else []),
        *_nat_alarms(spec),
        _dead_letters_alarm(spec),
        *([_queue_alarm(spec)] if spec.alarms.unread_notices else []),
    )
    names = bucket_names(spec, place)
    return ObservabilityPlan(
        name=spec.name,
        board=f"{spec.name}-{place.region}",
        region=place.region,
        log_groups=log_groups(spec),
        log_days=log_days(spec.observability.log_days),
        alarms=alarms,
        alarm_arns=tuple(place.arn("cloudwatch", f"alarm:{alarm.name}") for alarm in alarms),
        groups=groups,
        queue=queue_name(spec),
        dead_letters=dead_letters_name(spec),
        buckets=(names.data, names.checkpoints),
        hyperpod=spec.hyperpod,
        dashboard=spec.observability.dashboard,
        workspace=workspace(spec, place),
    )


def workspace(spec: ClusterSpec, place: Place) -> WorkspacePlan | None:
    """Return the workspace of a cluster whose metrics AWS keeps."""
    if spec.observability.prometheus != "amp":
        return None
    if spec.monitor is None:
        return WorkspacePlan(spec.name)
    topic = place.arn("sns", topic_name(spec))
    return WorkspacePlan(spec.name, rule_groups(spec.name), alert_manager(topic, place.region))


def log_days(wanted: int) -> int:
    """Return the shortest retention that CloudWatch Logs knows and that keeps logs for `wanted` days (1 to 3653)."""
    return next(days for days in LOG_DAYS if days >= wanted)


def _lustre_alarms(spec: ClusterSpec) -> tuple[Alarm, ...]:
    """Return an alarm on the fullest storage target: a write fails as soon as one is full, whatever room the others have.

    `FreeDataStorageCapacity` has a sample a minute for each target: Minimum is what the fullest has left, SampleCount is
    the number of targets, hence capacity / SampleCount is what each can hold
    (https://docs.aws.amazon.com/fsx/latest/LustreGuide/fs-metrics.html). Capacity is the nominal one; Lustre keeps a few
    percent for itself, so the alarm is a little early. Intelligent-Tiering has no capacity to run out of, and that of a
    file system of the user is not known here: neither gets this alarm.
    """
    planned = lustre_plan(spec)
    if planned is None or not planned.capacity_gib:
        return ()
    percent = 100 * spec.alarms.lustre_free_fraction
    return (
        Alarm(
            name=f"{spec.name}-lustre-full",
            subject="lustre",
            description=(
                f"The fullest storage target of the Lustre file system {{id}} has less than {percent:g} % free. Once it is "
                "full, writes to it fail, and a run that writes there ends. First: `lfs df -h` on a node shows each target; "
                "delete old files, or increase the file system's capacity"
            ),
            metrics=(
                Metric("free", "AWS/FSx", "FreeDataStorageCapacity", "Minimum", "FileSystemId"),
                Metric("targets", "AWS/FSx", "FreeDataStorageCapacity", "SampleCount", "FileSystemId"),
            ),
            expression=f"100 * free * targets / {planned.capacity_gib * GIB}",
            label="free on the fullest storage target, percent",
            comparison="LessThanThreshold",
            threshold=percent,
            periods=5,
            missing="missing",
        ),
    )


def _home_alarms(spec: ClusterSpec) -> tuple[Alarm, ...]:
    """Return the alarm on the file system of homes; one of the user's has none of ours."""
    config = spec.storage.home
    if config is None or config.existing is not None:
        return ()
    return (_home_alarm(spec) if config.type == "openzfs" else _efs_alarm(spec),)


def _efs_alarm(spec: ClusterSpec) -> Alarm:
    """Return the alarm on what EFS bills: it has no capacity to run out of, and elastic throughput serves any demand.

    AWS advises an alarm on this metric: https://docs.aws.amazon.com/efs/latest/ug/managing-throughput.html
    """
    limit = spec.alarms.home_gb_per_hour
    return Alarm(
        name=f"{spec.name}-home-traffic",
        subject="home",
        description=(
            f"EFS meters more than {limit:g} GB an hour of reads and writes in home folders, and bills them. The run itself is "
            "not affected. First: look for a job that reads its data or writes its checkpoints in a home, and move them to "
            "Lustre, S3 or /scratch"
        ),
        metrics=(Metric("metered", "AWS/EFS", "MeteredIOBytes", "Sum", "FileSystemId", HOUR),),
        expression="metered / 1000000000",
        label="GB an hour of home folders",
        threshold=limit,
    )


def _home_alarm(spec: ClusterSpec) -> Alarm:
    """Metrics: https://docs.aws.amazon.com/fsx/latest/OpenZFSGuide/metrics.html"""
    return Alarm(
        name=f"{spec.name}-home-full",
        subject="home",
        description=(
            f"Home folders fill more than {HOME_FULL_PERCENT} % of their file system. When it is full, jobs and logins fail "
            "on every node at once. First: delete what is not needed, or raise storage.home.capacity_gib and run pulumi up"
        ),
        metrics=(
            Metric("used", "AWS/FSx", "UsedStorageCapacity", "Maximum", "FileSystemId"),
            Metric("capacity", "AWS/FSx", "StorageCapacity", "Maximum", "FileSystemId"),
        ),
        expression="100 * used / capacity",
        label="used of the home file system, percent",
        threshold=HOME_FULL_PERCENT,
        periods=5,
        missing="missing",
    )


def _dead_letters_alarm(spec: ClusterSpec) -> Alarm:
    return Alarm(
        name=f"{spec.name}-notices-lost",
        subject="dead letters",
        description=(
            "A notice could not be delivered to its queue or to the mail topic. A "
            "node may have gone without a save. First: read it with aws sqs receive-message --queue-url "
            "$(aws sqs get-queue-url --queue-name {id} --query QueueUrl --output text)"
        ),
        metrics=(Metric("lost", "AWS/SQS", "ApproximateNumberOfMessagesVisible", "Maximum", "QueueName"),),
        expression="1 * lost",
        label="notices that were not delivered",
    )


def _incomplete_group_alarm(spec: ClusterSpec, group: Group) -> Alarm:
    """Against what the group wants at the time, so that a group scaled to nothing on purpose is silent.

    A group without these metrics breaches: they are off by default, and then a missing node would go unnoticed. Where the
    start of a block is not known, its group may be empty by right: an empty one is silent, which also hides a block that has
    begun and gave nothing, and one that lost all its nodes at once.
    """
    block = group.capacity.mode == "capacity-block" and group.capacity.starts_at is None
    silent = " (silent while there is none at all: the capacity block may not have begun)" if block else ""
    reason = "aws autoscaling describe-scaling-activities --auto-scaling-group-name {id}"
    harm = "A run that needs all of them cannot start or go on"
    if group.role == LOGIN:
        harm = "Jobs can still be submitted on Slurm's controller"
    if spec.goes_to_zero(group):
        tries = (
            "Slurm's controller sets what the group wants by the jobs that wait, and less after a launch that failed"
        )
        stops = _stops_to_zero(spec)
    else:
        resume = "aws autoscaling resume-processes --auto-scaling-group-name {id}"
        tries = f"The group keeps trying, for about a day while nothing comes (then: {resume})"
        zero = (
            "aws autoscaling update-auto-scaling-group --auto-scaling-group-name {id} --min-size 0 --desired-capacity 0"
        )
        stops = f". To stop paying meanwhile: {zero}"
    return Alarm(
        name=f"{spec.name}-{group.name}-incomplete",
        subject=f"group:{group.name}",
        description=(
            f"Group {group.name} has had fewer nodes in service than it wants for {GANG_MINUTES} minutes{silent}. "
            f"{harm}. {tries}, and the nodes that it has are billed. First: {reason} gives the reason{stops}"
        ),
        metrics=(
            Metric("wanted", "AWS/AutoScaling", "GroupDesiredCapacity", "Maximum", "AutoScalingGroupName"),
            Metric("there", "AWS/AutoScaling", "GroupInServiceInstances", "Minimum", "AutoScalingGroupName"),
        ),
        expression="IF(there > 0, wanted - there, 0)" if block else "wanted - there",
        label="nodes missing",
        periods=GANG_MINUTES,
        missing="breaching",
    )


def _stops_to_zero(spec: ClusterSpec) -> str:
    """Return what else to look at, and how to stop paying for a group whose desired capacity the controller sets: it sets
    a lowered one back within half a minute, and Auto Scaling ends no machine of it, since all are protected."""
    assert spec.scheduler is not None
    end = (
        "aws autoscaling terminate-instance-in-auto-scaling-group --should-decrement-desired-capacity --instance-id ID"
    )
    return (
        ", and `journalctl -u lustrain-slurm` on the controller what was done. To stop paying meanwhile: `squeue`, then "
        f"`scancel` the jobs that wait; machines without a job end after {spec.scheduler.idle_minutes} minutes. At once, with "
        f"what runs there: {end}"
    )


def _boot_alarm(spec: ClusterSpec) -> Alarm:
    """Return the alarm on failed boots: a node whose boot failed is in service for its group, which looks at the machine
    alone. When the alarm ends, nothing is mended: it counts one minute, and the node stays as it is, for an hour at most in a
    group that goes to zero."""
    to_zero = any(spec.goes_to_zero(group) for group in spec.groups)
    keeps = f" (the log is also in CloudWatch, /lustrain/{spec.name}/node)" if carries_logs(spec) else " with its log"
    ends = f". Where min_count is 0 it is ended after {BOOTED_WITHIN_S / MINUTE:.0f} minutes{keeps}" if to_zero else ""
    monitor = " (where it names none, it is the monitor)" if spec.monitor else ""
    return Alarm(
        name=f"{spec.name}-boot-failed",
        subject="cluster",
        description=(
            "A node failed to boot: it could not mount or set up what it needs. It takes no part in the run and is billed. "
            f"First: `fab node-verify` says which node it is{monitor}. On that machine, /var/lib/lustrain/boot names the step "
            f"that failed, and /var/log/lustrain-boot.log says why{ends}"
        ),
        metrics=(Metric("failed", BOOT_NAMESPACE, BOOT_FAILED, "Sum", "Cluster"),),
        expression="1 * failed",
        label="boots that failed",
        mails_end=False,
    )


def _stalled_alarm(spec: ClusterSpec) -> Alarm:
    """Return the alarm on a run that makes no step, by what its rank 0 sends each minute (`trainer.metrics.cloudwatch`).

    Of several runs the slowest counts. Where no run is, there are no data, which is right; the same silence hides a run whose
    rank 0 is gone: its launcher, and for nodes the alarms on groups, notice that.
    """
    limit = spec.alarms.stalled_minutes
    return Alarm(
        name=f"{spec.name}-run-stalled",
        subject="cluster",
        description=(
            f"A run has made no step for {limit} minutes; its nodes are billed meanwhile. First: `fab status RUN` says where "
            f"it stands, and `fab logs RUN` what it printed last. If a compilation or an evaluation takes {limit} minutes, set "
            "alarms.stalled_minutes to more"
        ),
        metrics=(Metric("since", "Lustrain", "seconds_since_step", "Maximum", "Cluster"),),
        expression="since / 60",
        label="minutes since the last step of a run",
        threshold=limit,
        periods=STALLED_MINUTES,
    )


def _machine_alarm(spec: ClusterSpec, subject: str, name: str, harm: str, keeps: str) -> Alarm:
    """Return the alarm on a machine that stands alone: EC2 recovers it from faulty hardware by itself within minutes, and not
    from what its own system does (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/monitoring-system-instance-status-check.html)."""
    return Alarm(
        name=f"{spec.name}-{subject}-down",
        subject=subject,
        description=(
            f"{name} has failed EC2's status checks, or reported nothing, for {MACHINE_MINUTES} minutes. "
            f"{harm}. First: aws ec2 reboot-instances "
            f"--instance-ids {{id}}. If that does not help: pulumi up --refresh --replace '**{spec.name}-{subject}-instance' "
            f"makes it anew with its {keeps}"
        ),
        metrics=(Metric("failed", "AWS/EC2", "StatusCheckFailed", "Maximum", "InstanceId"),),
        expression="1 * failed",
        label=f"failed status checks of the {subject}",
        periods=MACHINE_MINUTES,
        missing="breaching",
    )


def _controller_alarm(spec: ClusterSpec) -> Alarm:
    harm = "Running jobs go on; none starts, and none that fails starts again"
    return _machine_alarm(spec, "controller", "Slurm's controller", harm, "address and state")


def _monitor_alarm(spec: ClusterSpec) -> Alarm:
    harm = "Training goes on; metrics are not kept meanwhile, and no alert of Prometheus fires"
    return _machine_alarm(spec, "monitor", "The monitor", harm, "data")


def _nat_alarms(spec: ClusterSpec) -> tuple[Alarm, ...]:
    """Return the alarm on what the NAT gateway bills: each gigabyte in both directions; S3's gateway endpoint costs nothing
    (https://docs.aws.amazon.com/vpc/latest/userguide/nat-gateway-pricing.html)."""
    if not spec.network.nat or spec.network.closed or spec.network.existing:
        return ()
    limit = spec.alarms.nat_gb_per_hour
    return (
        Alarm(
            name=f"{spec.name}-nat-traffic",
            subject="nat",
            description=(
                f"More than {limit:g} GB an hour go through the NAT gateway, and each is billed. The run itself is "
                "not affected. S3 in this region does not count. First: look for a bucket in another region, images from a "
                "public registry, or a missing gateway endpoint"
            ),
            metrics=(
                Metric("sent", "AWS/NATGateway", "BytesOutToDestination", "Sum", "NatGatewayId", HOUR),
                Metric("got", "AWS/NATGateway", "BytesInFromDestination", "Sum", "NatGatewayId", HOUR),
            ),
            expression="(sent + got) / 1000000000",
            label="GB an hour through NAT",
            threshold=limit,
        ),
    )


def _queue_alarm(spec: ClusterSpec) -> Alarm:
    """For a queue that runs read. Rules of EC2 pass the notices of the whole account, also while this cluster has no node and
    so no run: silent then. What readers took three times and left is not in the age (`interruptions.py`).

    More groups than an alarm can count, or nodes of HyperPod, which have no such count: the age alone.
    """
    groups = () if spec.hyperpod else tuple(f"group:{group.name}" for group in spec.workers)
    counted = groups if len(groups) <= COUNTED_GROUPS else ()
    nodes = tuple(
        Metric(
            f"nodes{index}",
            "AWS/AutoScaling",
            "GroupInServiceInstances",
            "Minimum",
            "AutoScalingGroupName",
            subject=subject,
        )
        for index, subject in enumerate(counted)
    )
    in_service = " + ".join(f"FILL({metric.id}, 0)" for metric in nodes)
    foreign = (
        ""
        if spec.hyperpod
        else ". The notice may concern an instance outside this cluster: EC2's notices are account-wide"
    )
    return Alarm(
        name=f"{spec.name}-notices-unread",
        subject="queue",
        description=(
            f"A notice has waited in the interruption queue for {UNREAD_MINUTES} minutes, so no run has read it: "
            "what only the queue announces is missed, and a node's end is known by its own metadata alone. First: see whether "
            f"a run trains on these nodes, and whether its log has a warning about the queue{foreign}"
        ),
        metrics=(Metric("age", "AWS/SQS", "ApproximateAgeOfOldestMessage", "Maximum", "QueueName"), *nodes),
        expression=f"IF({in_service} > 0, age / 60, 0)" if nodes else "age / 60",
        label="minutes that the oldest notice has lain",
        threshold=UNREAD_MINUTES,
        periods=2,
    )


def dashboard(plan: ObservabilityPlan, ids: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a CloudWatch dashboard; `ids` has the id of each subject that there is, values may be Outputs
    (https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/CloudWatch-Dashboard-Body-Structure.html)."""
    widgets: list[dict[str, Any]] = [_alarm_widget(plan)]
    if "lustre" in ids:
        widgets += _lustre_widgets(plan, ids["lustre"])
    groups = [ids[subject] for subject in plan.groups if subject in ids]
    if groups:
        names = ("GroupInServiceInstances", "GroupDesiredCapacity")
        rows = [["AWS/AutoScaling", name, "AutoScalingGroupName", group] for group in groups for name in names]
        widgets.append(_graph(plan, "Nodes in service and wanted", rows, "Minimum"))
    if "nat" in ids:
        names = ("BytesOutToDestination", "BytesInFromDestination")
        rows = [["AWS/NATGateway", name, "NatGatewayId", ids["nat"]] for name in names]
        widgets.append(_graph(plan, "Bytes through NAT", rows, "Sum", 300))
    rows = [["AWS/SQS", name, "QueueName", plan.queue] for name in ("NumberOfMessagesSent", "NumberOfMessagesDeleted")]
    widgets.append(_graph(plan, "Notices sent and handled", rows, "Sum", 300))
    sizes = [
        ["AWS/S3", "BucketSizeBytes", "StorageType", "StandardStorage", "BucketName", name] for name in plan.buckets
    ]
    widgets.append(_graph(plan, "Bytes in buckets, S3 Standard", sizes, "Average", 24 * HOUR))
    if plan.log_groups:
        for title, name in (("Tokens per second", "tokens_per_second"), ("Goodput", "goodput_ratio")):
            # A run has a name that is not known here.
            query = f"SEARCH('{{Lustrain,Cluster,Run}} Cluster=\"{plan.name}\" MetricName=\"{name}\"', 'Average', 60)"
            widgets.append(_graph(plan, f"{title} of runs", [[{"expression": query}]], "Average"))
    if plan.hyperpod:
        search = f"SEARCH('Namespace=\"{HYPERPOD_NAMESPACE}\" {plan.name}', 'Average', 300)"
        widgets.append(_graph(plan, "What HyperPod nodes report", [[{"expression": search}]], "Average", 300))
    return {"widgets": [{**widget, **_spot(index)} for index, widget in enumerate(widgets)]}


def _alarm_widget(plan: ObservabilityPlan) -> dict[str, Any]:
    return {"type": "alarm", "properties": {"title": f"Alarms of {plan.name}", "alarms": list(plan.alarm_arns)}}


def _lustre_widgets(plan: ObservabilityPlan, file_system: Any) -> list[dict[str, Any]]:
    def rows(*names: str) -> list[list[Any]]:
        return [["AWS/FSx", name, "FileSystemId", file_system] for name in names]

    return [
        _graph(plan, "Lustre bytes read and written", rows("DataReadBytes", "DataWriteBytes"), "Sum"),
        _graph(plan, "Lustre bytes free, all targets", rows("FreeDataStorageCapacity"), "Sum"),
        _graph(plan, "Lustre metadata operations", rows("MetadataOperations"), "Sum"),
    ]


def _graph(
    plan: ObservabilityPlan, title: str, rows: list[list[Any]], statistic: str, period: int = MINUTE
) -> dict[str, Any]:
    properties = {"title": title, "region": plan.region, "view": "timeSeries", "stat": statistic, "period": period}
    return {"type": "metric", "properties": {**properties, "metrics": rows}}


def _spot(index: int) -> dict[str, int]:
    """Two columns on the dashboard's grid of 24."""
    return {"x": 12 * (index % 2), "y": 6 * (index // 2), "width": 12, "height": 6}
