"""The words that start a program in a container of an image, by docker, podman or Slurm's Pyxis. Pure. Standard library and
Python 3.9 only: Slurm's batch script carries this file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

PYXIS, DOCKER, PODMAN = "pyxis", "docker", "podman"
INSIDE = ("HOME=/tmp", "LUSTRAIN_CACHE=/tmp/lustrain")
"""The user of the node has no home in the image."""
HOST_ONLY = ("PATH", "PYTHONPATH")
"""Variables that say where programs of the node are."""
EFA_DEVICES = "/dev/infiniband"
NO_ENGINE = "docker, whose daemon answers this user, or podman"
PREPARE = """engine=$1 image=$2
shift 2
host=${image%%/*}
by_proxy() {
    [ ! -r /etc/lustrain/proxy.env ] || { set -a && . /etc/lustrain/proxy.env && set +a; }
}
pull() (
    by_proxy
    "$engine" pull --quiet "$image" >/dev/null
)
pull_by_role() (
    command -v aws >/dev/null || exit
    by_proxy
    region=${host#*.dkr.ecr.}
    password=$(aws ecr get-login-password --region "${region%%.*}") || exit
    DOCKER_CONFIG=$(mktemp -d) && export DOCKER_CONFIG REGISTRY_AUTH_FILE="$DOCKER_CONFIG/config.json" || exit
    trap 'rm -rf "$DOCKER_CONFIG"' EXIT
    trap 'exit 143' HUP INT TERM USR1
    printf %s "$password" | "$engine" login --username AWS --password-stdin "$host" >/dev/null && pull
)
if ! "$engine" image inspect "$image" >/dev/null 2>&1; then
    case "$host" in
        *.dkr.ecr.*.amazonaws.com | *.dkr.ecr.*.amazonaws.com.cn) pull || pull_by_role || exit 125 ;;
        *) pull || exit 125 ;;
    esac
fi
"$@\""""
"""For `sh -c`, with the engine, the image and a command: has the image there, then runs the command. Where the node's own
logins do not open a registry of ECR, its role does; that login is gone once the image is there. A job has no variables of the
stack's proxy (network.proxy), which its nodes keep in a file."""
REPLACE = """engine=$1 prefix=$2
shift 2
for _ in 1 2 3 4 5; do
    left=$("$engine" ps --all --quiet --filter "name=^$prefix") || exit 125
    [ -n "$left" ] || exec "$@"
    "$engine" rm --force $left >/dev/null || sleep 2
done
echo "containers of an earlier launch are still here; fix: $engine rm --force" $left >&2
exit 125"""
"""For `sh -c`, with the engine, what names of containers begin with, and a command. A container outlives a client that was
killed, and holds its GPUs: what is left of earlier launches is removed first, or the command does not start."""


@dataclass(frozen=True)
class Container:
    """What a container of a run gets of its node. Network, shared memory and user are those of the node."""

    image: str
    """registry/repository@sha256:…"""
    mounts: tuple[str, ...] = ()
    """Paths of the node, which are the same inside."""
    gpus: bool = False
    """All of the node's GPUs."""
    efa: bool = False


@dataclass(frozen=True)
class Engine:
    """What starts containers on a node, and as whom."""

    kind: str
    """DOCKER, or PODMAN."""
    program: str
    """Its name, or its path."""
    user: str
    """UID:GID."""
    groups: tuple[str, ...] = ()
    """Numbers of the user's groups."""
    rootless: bool = False
    """It is not root who starts it, and there is no daemon of root's."""


def without_mount(container: Container, path: str) -> Container:
    """Return the container without the path itself; where it lies below another mount, it stays visible."""
    return replace(container, mounts=tuple(mount for mount in container.mounts if mount != path))


def run_words(
    engine: Engine, container: Container, variables: Sequence[str], name: str = "", *, interactive: bool = False
) -> list[str]:
    """Return the words before the program's own. `variables` are names: their values do not stand on the command line."""
    words = [engine.program, "run", "--rm", *([f"--name={name}"] if name else [])]
    words += ["--interactive"] if interactive else []
    # Its output goes to who has started it, and is kept there.
    words += ["--log-driver=none", "--network=host", "--ipc=host", f"--user={engine.user}"]
    if engine.rootless:
        # Numbers of groups mean others in its user namespace: https://docs.podman.io/en/latest/markdown/podman-run.1.html
        words += ["--userns=keep-id", "--group-add=keep-groups"]
    else:
        words += [f"--group-add={group}" for group in engine.groups]
    words += ["--cap-drop=ALL", "--security-opt=no-new-privileges"]
    if engine.kind == DOCKER:
        # Those of the daemon would hold, not of this process.
        words += ["--ulimit=stack=-1:-1", "--ulimit=nofile=131072:131072"]
        words += ["--ulimit=memlock=-1:-1"] if container.efa else []
    else:
        # 2048 processes are too few for the threads of all ranks; a label would keep it from shared folders.
        words += ["--ulimit=host", "--pids-limit=-1", "--security-opt=label=disable"]
    if container.gpus:
        words += ["--gpus=all"] if engine.kind == DOCKER else ["--device=nvidia.com/gpu=all"]
    words += [f"--device={EFA_DEVICES}"] if container.efa else []
    words += [f"--mount=type=bind,source={path},target={path}" for path in container.mounts]
    words += [f"--env={name}" for name in variables if name not in HOST_ONLY]
    words += [f"--env={pair}" for pair in INSIDE]
    return [*words, "--workdir=/tmp", container.image]


def pyxis_options(container: Container, name: str) -> list[str]:
    """Return the options of srun: https://github.com/NVIDIA/pyxis/wiki/Usage. With a name a node imports the image once."""
    paths = [*container.mounts, *([EFA_DEVICES] if container.efa else [])]
    return [
        f"--container-image={enroot_reference(container.image)}",
        f"--container-name={name}",
        *([f"--container-mounts={','.join(f'{path}:{path}' for path in paths)}"] if paths else []),
        "--container-workdir=/tmp",
        "--no-container-mount-home",
        "--no-container-remap-root",
    ]


def pyxis_words() -> list[str]:
    """Return the words before the program's own: Pyxis hands on what srun has, and the image's own variables go before it."""
    return ["env", *INSIDE]


def enroot_reference(image: str) -> str:
    """Return an image by digest as Enroot 3.4 and later read it: the digest in the place of the tag
    (`docker::_parse_uri` of https://github.com/NVIDIA/enroot/blob/master/src/docker.sh)."""
    name, _, digest = image.partition("@")
    registry, _, repository = name.partition("/")
    if registry != "localhost" and not {".", ":"} & {*registry}:
        registry, repository = "docker.io", name
    return f"{'registry-1.docker.io' if registry == 'docker.io' else registry}#{repository}:{digest}"


def kind_of(engine: str, version: str) -> str:
    """Return which engine a program is by what its `--version` prints: some machines have podman under docker's name."""
    return PODMAN if engine == PODMAN or "podman" in version.lower() else DOCKER


def prepared(engine: Engine, container: Container, words: Sequence[str]) -> list[str]:
    """Return a command that has the image on the node, then runs `words`."""
    return ["/bin/sh", "-c", PREPARE, "lustrain", engine.program, container.image, *words]


def replacing(engine: Engine, prefix: str, words: Sequence[str]) -> list[str]:
    """Return a command that removes the containers whose names begin so, then runs `words`."""
    return ["/bin/sh", "-c", REPLACE, "lustrain", engine.program, prefix, *words]


def trial_script(container: Container, variables: Sequence[str], user: str, groups: Sequence[str], python: str) -> str:
    """Return the script, for root, that chooses a node's engine, has the image there, and loads the trainer in a container that
    is like those of a launch. It prints the engine's kind and program; where it fails, its last line of errors says why."""

    def trial(kind: str) -> str:
        engine = Engine(kind, kind, user, tuple(groups))
        check = [python, "-c", "import trainer.node.launcher"]
        return shlex.join(prepared(engine, container, [*run_words(engine, container, variables), *check]))

    return f"""program=docker
timeout 30 docker version >/dev/null 2>&1 || program=podman
command -v "$program" >/dev/null || {{ echo "no container engine answers: docker, podman" >&2; exit 1; }}
case "$("$program" --version)" in *[Pp]odman*) kind={PODMAN} ;; *) kind={DOCKER} ;; esac
[ "$kind$program" != {PODMAN}{DOCKER} ] || program={PODMAN}
if [ "$kind" = {DOCKER} ]; then
    printed=$({trial(DOCKER)} 2>&1) || failed=$?
else
    printed=$({trial(PODMAN)} 2>&1) || failed=$?
fi
if [ -n "${{failed:-}}" ]; then
    echo "$printed" | grep -v " --help" | grep . | tail -n 1 >&2
    exit 1
fi
echo "$kind $(command -v "$program")"
"""
