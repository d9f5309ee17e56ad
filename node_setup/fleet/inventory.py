"""The nodes of a Cluster now: read from AWS each time, since nodes come and go, or from a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from lustrain import cluster as contract
from lustrain import deployed
from lustrain.cluster import Cluster
from lustrain.deployed import VARIABLE
from lustrain.problem import FAILED, UNREACHABLE, UserError, problem
from node_setup.fleet.hosts import THIS_MACHINE, Node, Route, parse_host, parse_hosts, parse_lines, select, unique

NO_CLUSTER = (
    f"there is no Cluster to take nodes from; fix: give --cluster FILE (or set {VARIABLE}), --stack NAME, --nodes a,b, "
    "--hosts-file FILE, or --local for this machine"
)
SSH_DOCUMENT = "AWS-StartSSHSession"
"""This is the session document behind `ssh` over SSM
(https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-getting-started-enable-ssh-connections.html)."""
PRIVATE = b"PRIVATE KEY-----"
FILTER_VALUES = 200
"""One filter takes so many values (https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeInstances.html)."""
ENDED = ("stopped", "terminated")
"""States in which an instance runs nothing (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-lifecycle.html)."""
Answer = TypeVar("Answer")
Client = Callable[[str], Any]
"""It returns an AWS client by the service's name."""


@dataclass(frozen=True)
class Source:
    """This is where nodes are taken from, as flags say it; at most one of `cluster`, `stack` and at most one of the rest."""

    cluster: str | None = None
    stack: str | None = None
    nodes: str | None = None
    hosts_file: str | None = None
    local: bool = False
    groups: tuple[str, ...] = ()
    pattern: str | None = None
    route: Route = field(default_factory=Route)
    """The flags' route goes before the Cluster's."""


@dataclass(frozen=True)
class Inventory:
    """These are the nodes of a run in the order of their turns, the Cluster they belong to, and what was left out."""

    nodes: tuple[Node, ...]
    cluster: Cluster | None = None
    notes: tuple[str, ...] = ()


def inventory(source: Source, client: Client | None = None) -> Inventory:
    """Return the nodes that `source` names, as they are now. UserError: exit code 3 where there are none."""
    sources = {"--nodes": source.nodes, "--hosts-file": source.hosts_file, "--local": source.local}
    given = [flag for flag, value in sources.items() if value not in (None, False)]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} name different nodes; fix: give one of them")
    cluster, lines = _cluster_and_lines(source)
    route = _route(cluster, source.route)
    notes: list[str] = []
    if source.local:
        nodes = [THIS_MACHINE]
    elif source.nodes is not None and (cluster is None or cluster.reach.via == "ssh"):
        nodes = parse_hosts(source.nodes, "--nodes", route)
    elif lines is not None:
        nodes = parse_lines(lines, source.hosts_file or "", route)
        if cluster is not None:
            _require_groups(nodes, cluster)
    elif cluster is not None:
        nodes, notes = nodes_of(cluster, route, client or _client(cluster))
        if source.nodes is not None:
            nodes = _select_named(nodes, source.nodes)
    else:
        raise UserError(NO_CLUSTER, UNREACHABLE)
    if cluster is not None:
        nodes = [_with_group(node, cluster) for node in nodes]
    left = select(nodes, source.groups, source.pattern)
    if not left:
        raise UserError(
            "; ".join(["there are no nodes", *notes]) + "; fix: wait for nodes, or name others", UNREACHABLE
        )
    return Inventory(tuple(left), cluster, tuple(notes))


def cluster_nodes(cluster: Cluster, groups: Sequence[str]) -> list[Node]:
    """Return the nodes of these groups of a Cluster, as they are now. UserError."""
    nodes, _ = nodes_of(cluster, _route(cluster, Route()), _client(cluster))
    return select([_with_group(node, cluster) for node in nodes], groups)


def ended_instances(cluster: Cluster, ids: Sequence[str], client: Client | None = None) -> set[str]:
    """Return which instances of the Cluster have ended; EC2 knows nothing of them an hour later. UserError."""
    ec2 = (client or _client(cluster))("ec2")
    known = _answer_from_aws(lambda: list(_instances(ec2, ids)))
    return set(ids) - {one["InstanceId"] for one in known if one["State"]["Name"] not in ENDED}


def nodes_of(cluster: Cluster, route: Route, client: Client) -> tuple[list[Node], list[str]]:
    """Return the nodes that the Cluster has at this moment, and a line for each that is left out. UserError."""
    if cluster.nodes.addresses:
        nodes = [parse_host(address, "cluster.nodes.addresses", route) for address in cluster.nodes.addresses]
        return [_with_group(node, cluster) for node in unique(nodes, "cluster.nodes.addresses")], []
    list_nodes = _hyperpod_nodes if cluster.nodes.hyperpod_cluster else _auto_scaling_nodes
    nodes, notes = _answer_from_aws(lambda: list_nodes(cluster, client))
    names = [node.name for node in nodes]
    shown = [node if names.count(node.name) == 1 else replace(node, name=node.instance_id or "") for node in nodes]
    return [
        with_route(node, cluster, route) for node in sorted(shown, key=lambda node: (node.group or "", node.name))
    ], notes


def _require_groups(nodes: Sequence[Node], cluster: Cluster) -> None:
    """Raise UserError for each node of a group that the Cluster does not have."""
    foreign = [node for node in nodes if node.group and node.group not in cluster.groups]
    why, known = "is not one of the Cluster's", ", ".join(cluster.groups)
    if foreign:
        raise UserError([problem(f"group of {node.name}", node.group, why, allowed=known) for node in foreign])


def _with_group(node: Node, cluster: Cluster) -> Node:
    """Return the node with its group: the cluster's only group, else what the node itself knows."""
    if node.group is not None or len(cluster.groups) != 1:
        return node
    (name, group), *_ = cluster.groups.items()
    return replace(node, group=name, instance_type=node.instance_type or group.type)


def _auto_scaling_nodes(cluster: Cluster, client: Client) -> tuple[list[Node], list[str]]:
    wanted, notes = list(cluster.nodes.auto_scaling_groups), []
    pages = client("autoscaling").get_paginator("describe_auto_scaling_groups")
    groups = [group for page in pages.paginate(AutoScalingGroupNames=wanted) for group in page["AutoScalingGroups"]]
    if gone := sorted(set(wanted) - {group["AutoScalingGroupName"] for group in groups}):
        why = "there is no such Auto Scaling group"
        fix = "`pulumi up`, or give the Cluster of the stack that stands now"
        raise UserError(
            [problem("cluster.nodes.auto_scaling_groups", name, why, fix=fix) for name in gone], UNREACHABLE
        )
    ids = []
    for member in (member for group in groups for member in group["Instances"]):
        if member["LifecycleState"] == "InService" and member["HealthStatus"].lower() == "healthy":
            ids.append(member["InstanceId"])
        else:
            state = f"{member['LifecycleState']}, {member['HealthStatus'].lower()}"
            notes.append(f"{member['InstanceId']} left out: {state}")
    nodes = []
    for instance in _instances(client("ec2"), [*ids, *cluster.nodes.instances]):
        if instance["State"]["Name"] == "running":
            nodes.append(_ec2_node(instance))
        else:
            notes.append(f"{instance['InstanceId']} left out: {instance['State']['Name']}")
    return nodes, notes


def _instances(ec2: Any, ids: Sequence[str]) -> Iterable[Mapping[str, Any]]:
    # By filter, not by id: an instance that has gone in between is left out instead of failing the whole call.
    pages = ec2.get_paginator("describe_instances")
    for begin in range(0, len(ids), FILTER_VALUES):
        some = list(ids[begin : begin + FILTER_VALUES])
        for page in pages.paginate(Filters=[{"Name": "instance-id", "Values": some}]):
            for reservation in page["Reservations"]:
                yield from reservation["Instances"]


def _ec2_node(instance: Mapping[str, Any]) -> Node:
    tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", [])}
    address = instance.get("PrivateIpAddress") or instance["InstanceId"]
    name = instance.get("PrivateDnsName", "").partition(".")[0] or instance["InstanceId"]
    return Node(name, address, tags.get("lustrain:group"), instance["InstanceId"], instance["InstanceType"])


def _hyperpod_nodes(cluster: Cluster, client: Client) -> tuple[list[Node], list[str]]:
    nodes, notes = [], []
    pages = client("sagemaker").get_paginator("list_cluster_nodes")
    for page in pages.paginate(ClusterName=cluster.nodes.hyperpod_cluster):
        for summary in page["ClusterNodeSummaries"]:
            status = summary["InstanceStatus"]["Status"]
            instance_id = summary.get("InstanceId", "")
            if status != "Running" or not instance_id:
                notes.append(f"{instance_id or summary['InstanceGroupName']} left out: {status}")
                continue
            host = summary.get("PrivateDnsHostname") or instance_id
            kind = summary["InstanceType"].removeprefix("ml.")
            nodes.append(Node(host.partition(".")[0], host, summary["InstanceGroupName"], instance_id, kind))
    return nodes, notes


def with_route(node: Node, cluster: Cluster, route: Route) -> Node:
    """Return the node with its route; over SSM the address is the instance's id and a session's process is the connection."""
    if cluster.reach.via == "ssh" or not node.instance_id:
        return replace(node, route=route)
    form = cluster.reach.ssm_target or "{instance_id}"
    target = form.format(instance_id=node.instance_id, group=node.group or "")
    region = ("--region", cluster.region) if cluster.region else ()
    words = ("aws", "ssm", "start-session", "--target", target, "--document-name", SSH_DOCUMENT)
    proxy = (*words, "--parameters", f"portNumber={route.port or 22}", *region)
    return replace(node, address=node.instance_id, route=replace(route, jump=None, proxy=proxy))


def _select_named(nodes: Sequence[Node], text: str) -> list[Node]:
    """Return the cluster's nodes that `--nodes` names; behind SSM there is no other way to them."""
    left = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        named = [node for node in nodes if word in (node.name, node.address, node.instance_id)]
        if not named:
            raise UserError(
                problem("--nodes", word, "is not a node of this cluster", fix="`fab node-facts` lists them"),
                UNREACHABLE,
            )
        left += named
    return unique(left, "--nodes")


def _route(cluster: Cluster | None, flags: Route) -> Route:
    """Return the route from flags, else from the Cluster. UserError where the key cannot be read, before any node is called."""
    reach = cluster.reach if cluster else None
    key = flags.key or (reach.key if reach else None)
    if key is not None:
        path = Path(key).expanduser()
        where = "--key" if flags.key else "cluster.reach.key"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(problem(where, key, error.strerror or "cannot be read", fix="name a private key")) from None
        if PRIVATE not in content:
            fix = "name the private key" + (", without .pub" if path.suffix == ".pub" else "")
            raise UserError(problem(where, key, "is not a private key", allowed="OpenSSH's format or PEM", fix=fix))
        key = str(path)
    if reach is None:
        return replace(flags, key=key)
    return Route(flags.user or reach.user, flags.port, key, flags.jump or reach.jump)


def _cluster_and_lines(source: Source) -> tuple[Cluster | None, str | None]:
    """Return the Cluster, where one is given, and the lines of a hosts file that is not a Cluster."""
    text = None if source.hosts_file is None else deployed.text_of(source.hosts_file, "--hosts-file")
    if text is None or not text.lstrip().startswith("{"):
        return deployed.cluster(source.cluster, source.stack), text
    if source.cluster or source.stack:
        raise UserError(f"{source.hosts_file} is a Cluster itself; fix: leave out --cluster and --stack")
    return contract.decoded(text, str(source.hosts_file)), None


def _client(cluster: Cluster) -> Client:
    def client(service: str) -> Any:
        import boto3
        from botocore.config import Config

        patience = Config(connect_timeout=5, read_timeout=20, retries={"mode": "standard", "total_max_attempts": 4})
        make: Any = boto3.client
        return make(service, region_name=cluster.region, config=patience)

    return client


def _answer_from_aws(ask: Callable[[], Answer]) -> Answer:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return ask()
    except (BotoCoreError, ClientError) as error:
        message = " ".join(str(error).split())
        raise UserError(
            f"AWS cannot list the cluster's nodes: {message}; fix: log in to its account and region", FAILED
        ) from None
