"""Tags on every resource that takes them, so that cost allocation and the node role's conditions miss nothing."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import pulumi


def tag_everything(tags: Mapping[str, str]) -> None:
    """From now on each AWS resource of this program with a `tags` argument gets `tags`, its own winning.

    Done here and not by the provider's default tags: an explicit provider would ignore what a user configures under
    `aws:` (profile, role to assume, endpoints). Auto Scaling groups, launch templates and HyperPod have tags of another
    form, which their plans fill.
    """

    def transform(args: pulumi.ResourceTransformationArgs) -> pulumi.ResourceTransformationResult | None:
        if not args.type_.startswith("aws:") or not _takes_tags(type(args.resource)):
            return None
        own = args.props.get("tags")
        merged = pulumi.Output.from_input(own).apply(lambda own: {**tags, **(own or {})})
        return pulumi.ResourceTransformationResult({**args.props, "tags": merged}, args.opts)

    pulumi.runtime.register_stack_transformation(transform)


def _takes_tags(kind: type[pulumi.Resource]) -> bool:
    declared = getattr(kind, "_internal_init", None)
    if declared is None:
        return False
    tags = inspect.signature(declared).parameters.get("tags")
    return tags is not None and "Mapping" in str(tags.annotation)
