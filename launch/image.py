"""Whether the image of `fab train --image` can run on the nodes, and what its containers get of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from launch.container import Container
from launch.flags import TrainFlags
from launch.request import Target
from lustrain.problem import Problem, problem

DEFAULT = "image.json"
MAKE = "fab image-build --push, or give REGISTRY/REPOSITORY@sha256:…"
_DIGEST = r"[A-Za-z0-9\[][\w.:\[\]-]*(/[\w.-]+)+@sha256:[0-9a-f]{64}"
_PATH = re.compile(r"/[A-Za-z0-9_./+@=-]*")
"""A path that is a word in an option of docker, podman and Pyxis, and in a unit of systemd."""


def checked_image(flags: TrainFlags, target: Target, problems: list[Problem]) -> str:
    """Return the image by its digest, empty where it has none; adds what is wrong with it to `problems`."""
    ref, built_for = target.image
    name = flags.image or DEFAULT
    if not re.fullmatch(_DIGEST, ref):
        problems.append(problem("--image", name, "names no image by its digest", fix=MAKE))
        ref = ""
    gpus = target.group.gpus if target.group else 0
    if target.group is not None and built_for and (built_for == "cpu") != (not gpus):
        nodes = f"nodes with {gpus} GPUs" if gpus else "nodes without GPUs"
        problems.append(problem("--image", name, f"is built for {built_for}, and the group has {nodes}"))
    return ref


def container_of(flags: TrainFlags, target: Target, problems: list[Problem]) -> Container | None:
    """Return the container of each node; None without --image. Adds what is wrong with it to `problems`."""
    if flags.image is None:
        return None
    image = checked_image(flags, target, problems)
    group, built_for = target.group, target.image[1]
    if group is None and image and not built_for:
        why = "without a Cluster it is not known whether it needs GPUs"
        problems.append(problem("--image", flags.image, why, fix="give the image.json of its build, or --cluster"))
    if built_for == "gaudi":
        problems.append(problem("--image", flags.image, "is built for gaudi, whose containers start on no node yet"))
    for path, folder in target.paths.items():
        if not folder.startswith("/"):
            why = "is relative, and containers have no such folder"
            problems.append(problem(path, folder, why, fix="give its absolute path"))
        elif not _PATH.fullmatch(folder):
            allowed = "letters, digits and _ . / + @ = -"
            problems.append(problem(path, folder, "cannot be mounted in a container", allowed=allowed))
    return Container(
        image=image,
        mounts=outermost(target.paths.values()),
        gpus=bool(group.gpus) if group else built_for == "cuda",
        efa=bool(group and group.efa),
    )


def outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the paths that lie below none of the others, sorted."""
    listed = sorted({path.rstrip("/") or "/" for path in paths})
    return tuple(
        path
        for path in listed
        if not any(path.startswith(f"{other.rstrip('/')}/") for other in listed if other != path)
    )
