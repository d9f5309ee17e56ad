"""The lifecycle bundle in its bucket."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pulumi
import pulumi_aws as aws

from infra.plan.nodes.bundle import Bundle, BundleFile
from lustrain.files import write_whole
from lustrain.problem import UserError, problem
from node_setup.pack import BUILD

FOLDER = BUILD / "bundle"
"""Where what is generated lies while the engine uploads it; git ignores it."""


class LifecycleBundle(pulumi.ComponentResource):
    """Puts one bundle under its own prefix; a later bundle goes beside it and this one stays, also after `pulumi destroy`,
    since a node that HyperPod replaces reads the bundle that the cluster names at that moment.

    `uri` names the prefix; whatever reads it must wait for this component, and so for the objects.
    """

    uri: pulumi.Output[str]

    def __init__(
        self,
        name: str,
        bundle: Bundle,
        bucket: pulumi.Input[str],
        *,
        later: Mapping[str, pulumi.Output[str]] = MappingProxyType({}),
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`later` has what is known after the deployment only, by what stands for it in generated files."""
        super().__init__("lustrain:infra:LifecycleBundle", name, None, opts)
        for file in bundle.files:
            text, asset = _completed(file, later), None
            if text is None:
                asset = pulumi.FileAsset(str(file.source or written(file)))
            aws.s3.BucketObjectv2(
                f"{name}-{bundle.sha}-{file.path}",
                bucket=bucket,
                key=bundle.key(file),
                source=asset,
                content=text,
                source_hash=file.sha256,
                opts=pulumi.ResourceOptions(parent=self, retain_on_delete=True),
            )
        self.sha = bundle.sha
        self.uri = pulumi.Output.format("s3://{0}/{1}", bucket, bundle.prefix)
        self.register_outputs({"uri": self.uri})


def _completed(file: BundleFile, later: Mapping[str, pulumi.Output[str]]) -> pulumi.Output[str] | None:
    """Return the content with what `later` knows; None for a file in which nothing stands for that."""
    for placeholder, value in later.items():
        if file.source is None and placeholder.encode() in file.content:
            parts = file.content.decode("utf-8").split(placeholder)
            return value.apply(lambda known, parts=parts: known.join(parts))  # type: ignore[misc]
    return None


def written(file: BundleFile, folder: Path = FOLDER) -> Path:
    """Return the generated file on disk, for an engine that only uploads files; UserError where it cannot be written.

    It is called by its content and put in place whole, since programs of several stacks may run side by side.
    """
    path = folder / file.sha256 / file.path
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, file.content)
    except OSError as error:
        why = f"cannot be written: {error.strerror}"
        raise UserError(problem("lifecycle bundle", str(path), why, fix="make room, or make it writable")) from None
    return path
