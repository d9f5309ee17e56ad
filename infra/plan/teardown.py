"""What a person has to do by hand: after the first `pulumi up`, and around the last `pulumi destroy`."""

from __future__ import annotations

from infra.config import ClusterSpec, Group
from infra.plan.nodes.eks import helm_commands, helm_place
from infra.plan.nodes.hyperpod import protected
from infra.plan.place import COST_TAG
from infra.plan.stack import Plan
from infra.plan.storage.home import EfsPlan
from infra.plan.storage.repository import url
from infra.plan.watch.budget import ACTIVATE
from infra.plan.watch.grafana import SIGN_IN
from infra.plan.watch.machine import forwarding
from infra.plan.watch.monitor import PASSWORD

CANCEL = (
    """for id in $(pulumi stack output reservations --json | tr '[]",' ' '); do """
    "aws ec2 cancel-capacity-reservation --capacity-reservation-id $id; done"
)
KARPENTER = "https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-autoscaling-nodeclass.html"


def first_steps(plan: Plan) -> tuple[str, ...]:
    """Lines to read after the first `pulumi up`: the steps that no API offers."""
    spec, lines = plan.spec, []
    if spec.budget:
        lines.append(f"Let the budget see the cluster's tag, once per payer account: {ACTIVATE}")
        hand = [group.name for group in spec.groups if group.capacity.reservation or group.capacity.training_plan]
        if hand:
            lines.append(
                f"The budget does not see what was bought by hand for {', '.join(hand)}: it does not carry the cluster's tag"
            )
    if spec.alarms.emails:
        lines.append(f"Confirm the subscription that SNS mailed to {', '.join(spec.alarms.emails)}")
    if plan.controller:
        lines.append(
            "Submit jobs on Slurm's controller, which nodes join as they boot: "
            "aws ssm start-session --target $(pulumi stack output controller)"
        )
    for group in filter(spec.is_login, spec.groups):
        machine = find_machine(spec, group)
        lines.append(f"Or on a login of {group.name}: aws ssm start-session --target $({machine})")
    if plan.monitor:
        lines += _pages(plan)
    if plan.grafana:
        lines += _managed_pages(plan)
    if not spec.eks.existing and (commands := helm_commands(spec, plan.place)):
        lines.append(f"HyperPod wants its Helm chart before its nodes. Type in infra/, {helm_place(spec)}:")
        lines += [f"  {command}" for command in commands]
    if spec.backend == "hyperpod-eks" and spec.eks.karpenter:
        lines.append(f"Karpenter brings nodes once you have applied a HyperpodNodeClass and a NodePool: {KARPENTER}")
    return tuple(lines)


def find_machine(spec: ClusterSpec, group: Group) -> str:
    """Return the command that prints the id of a running machine of a group."""
    filters = {"instance-state-name": "running", f"tag:{COST_TAG}": spec.name, "tag:lustrain:group": group.name}
    words = " ".join(f"Name={name},Values={value}" for name, value in filters.items())
    return (
        f"aws ec2 describe-instances --filters {words} --query 'Reservations[0].Instances[0].InstanceId' --output text"
    )


def _pages(plan: Plan) -> list[str]:
    """Return how to see what the monitor has, for which no port is open."""
    assert plan.monitor is not None
    lines = [
        f"Open http://localhost:{port} while this runs: "
        f"{forwarding('$(pulumi stack output monitor)', port, plan.place.region)}"
        for port in plan.monitor.pages.values()
    ]
    if "grafana" in plan.monitor.pages:
        lines.append(
            f"Grafana's user is admin; its password, made on the machine: sudo grep PASSWORD {PASSWORD}, in "
            "aws ssm start-session --target $(pulumi stack output monitor)"
        )
    return lines


def _managed_pages(plan: Plan) -> list[str]:
    """Return what is left to do in Amazon Managed Grafana: who signs in, its data source and its pages."""
    return [
        "Let people in, in the console of Amazon Managed Grafana under the workspace's users: one of IAM Identity Center as "
        f"admin at least ({SIGN_IN}); then open $(pulumi stack output grafana)",
        f"There add the data source, by AWS Data Sources, Amazon Managed Service for Prometheus, {plan.place.region}; "
        "then the pages: fab dashboards, and Dashboards, New, Import with each file",
    ]


EXPORTS = (
    "aws cloudwatch get-metric-statistics --namespace AWS/FSx --metric-name AgeOfOldestQueuedMessage --dimensions "
    "Name=FileSystemId,Value=$(pulumi stack output fileSystem) Name=Publisher,Value=AutoExport --start-time "
    "$(date -u -d '15 min ago' +%FT%TZ) --end-time $(date -u +%FT%TZ) --period 300 --statistics Maximum "
    "--query 'Datapoints[].Maximum'"
)
"""Seconds that the oldest change of a file has waited to be exported
(https://docs.aws.amazon.com/fsx/latest/LustreGuide/fs-metrics.html#auto-import-export-metrics)."""


def _before(spec: ClusterSpec) -> list[str]:
    """Return the steps that a destroy does not wait for."""
    lines = ["Stop the jobs and let them save: a destroy does not wait for them"]
    lustre = spec.storage.lustre
    if lustre and not lustre.existing:
        exported = [link.path for link in lustre.associations if link.export_events]
        if exported:
            lines.append(
                f"Wait until this shows 0: files that FSx has not exported to S3 yet are lost with the file system: {EXPORTS}"
            )
        where = f"outside {', '.join(exported)} on Lustre" if exported else "on Lustre"
        lines.append(f"Copy away what you need: what lies {where} is in no bucket, and ends with the file system")
    if spec.observability.grafana == "managed":
        lines.append(
            "Export the pages and alerts that people made in Grafana: its workspace goes too, and takes them along"
        )
    if protected(spec):
        beside = "controller, login nodes" if spec.backend == "hyperpod-slurm" else "EKS control plane"
        costs = "it would stay" if spec.eks.existing else f"it would stay and go on costing, with its {beside}"
        lines.append(f"HyperPod on a training plan is protected: {costs}. Unprotect it first: {unprotect(spec)}")
    if spec.backend == "hyperpod-eks" and spec.eks.existing:
        lines.append(
            f"EKS cluster {spec.eks_name} is not the stack's: it stays, and so do HyperPod's chart and the software of add-ons "
            "that the stack put into it"
        )
    return lines


def unprotect(spec: ClusterSpec) -> str:
    """Return the command that lets `pulumi destroy` take the HyperPod cluster of a training plan."""
    kind = "lustrain:infra:HyperPod\\$aws:cloudcontrol/resource:Resource"
    return (
        f'pulumi state unprotect --yes "urn:pulumi:$(pulumi stack --show-name)::lustrain::{kind}::{spec.name}-cluster"'
    )


def _again(plan: Plan) -> list[str]:
    """Return the lines to add to the description, so that a later `pulumi up` uses the kept resources."""
    made = [f"{bucket.key}: {bucket.name}" for bucket in plan.buckets if not bucket.existing]
    lines = [f"  buckets: {{{', '.join(made)}}}"] if made else []
    if not plan.repository.existing:
        lines.append(f"  repository: {{existing: {url(plan.spec, plan.place)}}}")
    if lines:
        lines.insert(
            0,
            "What you keep belongs to no stack then. Before another `pulumi up` under this name, add it to the description:",
        )
    return lines


def empty(bucket: str) -> str:
    """Return the command that removes a bucket with all versions of its objects, which `aws s3 rb --force` leaves in it."""
    steps = f"b = boto3.resource('s3').Bucket('{bucket}'); b.object_versions.delete(); b.delete()"
    return f'.venv/bin/python -c "import boto3; {steps}"'


def teardown(plan: Plan) -> tuple[str, ...]:
    """Lines to read before `pulumi destroy`: it stops at what holds data or money, which is protected."""
    spec = plan.spec
    own = [bucket.name for bucket in plan.buckets if not bucket.existing]
    lines = [
        *_before(spec),
        "Take down the nodes and everything that costs by the hour: pulumi destroy --exclude-protected",
        "What stays is data or paid capacity, and the network under it. Each costs until you remove it by hand:",
    ]
    if plan.lustre and not plan.lustre.existing:
        lines.append("  FSx for Lustre: aws fsx delete-file-system --file-system-id $(pulumi stack output fileSystem)")
    if isinstance(plan.home, EfsPlan):
        lines.append(
            "  EFS: aws efs delete-file-system --file-system-id $(pulumi stack output homeFileSystem)"
            " (backups stay in AWS Backup's vault aws/efs/automatic-backup-vault, 35 days at most)"
        )
    elif plan.home:
        lines.append(
            "  FSx for OpenZFS: aws fsx delete-file-system --file-system-id $(pulumi stack output homeFileSystem) "
            "--open-zfs-configuration SkipFinalBackup=false,Options=DELETE_CHILD_VOLUMES_AND_SNAPSHOTS"
            " (its snapshots and automatic backups go too; a final backup stays, and costs until you delete it)"
        )
    if plan.controller:
        lines.append(
            "  the volume of Slurm's state: aws ec2 delete-volume --volume-id $(pulumi stack output slurmState)"
        )
    if plan.monitor:
        lines.append("  the monitor's data: aws ec2 delete-volume --volume-id $(pulumi stack output monitorData)")
    if plan.observability.workspace:
        lines.append(
            "  metrics in AWS: aws amp delete-workspace --workspace-id $(pulumi stack output prometheus | cut -d / -f 5)"
        )
    if not plan.repository.existing:
        name = plan.repository.name
        lines.append(f"  images in {name}: aws ecr delete-repository --repository-name {name} --force")
    if made := plan.reservations:
        lines.append(f"  reserved capacity of {', '.join(one.group for one in made)}: {CANCEL}")
    checkpoints = plan.bucket_names.checkpoints
    for name in sorted(own, key=lambda name: name == checkpoints):
        lines.append(f"  {'ALL CHECKPOINTS, ' if name == checkpoints else ''}bucket {name}: {empty(name)}")
    lines += [
        "Then remove the rest: pulumi refresh, pulumi state unprotect --all, pulumi destroy. "
        "It only forgets what is listed above and deletes none of it, so remove that first",
        "pulumi stack rm --preserve-config removes the stack and keeps its file",
        *_again(plan),
        "A VPC that cannot be deleted may hold GuardDuty's own endpoint and security group: aws ec2 describe-vpc-endpoints "
        "--filters Name=tag:GuardDutyManaged,Values=true",
    ]
    return tuple(lines)
