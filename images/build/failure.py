"""The error of a failed build or push, in the words of the step that failed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from images.build.steps import Steps
from images.plan.references import parse
from images.registry import ecr
from images.registry.client import NEW_TAG
from images.registry.http import without_queries
from lustrain.problem import FAILED, USAGE, UserError, plain, problem

_LONGEST_STEP = 200
_FULL = re.compile("no space left on device|disk quota exceeded", re.IGNORECASE)
_PUSH = re.compile("failed to push|push access denied")
_GO_ON = "see that the registry runs and can be reached from here; a push goes on where it ended"
_KEPT = "the registry keeps the tag for the image that has it"
_REFUSALS = (
    (r"immutable|tag.?invalid|PUT request to \S+/manifests/\S+: 4(00|05|09)", _KEPT, NEW_TAG, USAGE),
    (
        r"name.?unknown|repository.?not.?found|not known to registry|POST request to \S+/blobs/uploads/\S*: 404",
        "the registry has no such repository",
        "{missing}",
        FAILED,
    ),
    (
        r"unauthorized|no basic auth|authentication required|denied|authoriz\w+ failed|: 40[13] ",
        "the registry refuses the credentials",
        "docker login {host}, or ask for the right to push to {repository}",
        FAILED,
    ),
    (
        "x509:|certificate",
        "the engine does not trust the registry",
        "put its CA into /etc/docker/certs.d/{host}/ca.crt on the engine's machine",
        FAILED,
    ),
    (
        "http response to https",
        "the registry does not speak TLS",
        "give it TLS; without, engines take only registries on their own machine",
        FAILED,
    ),
)
"""What a registry says where no second try helps, why that is, what to do, and the exit code."""
# Names of hosts and repositories and digests would be taken for a refusal.
_NAMES = re.compile(r"(?<=://)[^\s/\"]+|[0-9a-f]{12,}")
_PASSING = re.compile(
    r"refused|reset|eof|broken pipe|time(d )?out|unreachable|no route|closed|server error|unavailable|too many requests"
    r"|canceled|short write|no such host|temporary failure|: (429|50[0234]) ",
    re.IGNORECASE,
)


def failure(target: str, steps: Steps, prose: Sequence[str], pushed: Sequence[str] = ()) -> UserError:
    """Return the error of a build of `target`: a line that names the failed step and why, then the end of its log.

    `prose` is what the engine or the CLI said last, for failures that are no step's. `pushed` are the tags that were pushed.
    """
    found = steps.failed("\n".join(prose))
    log = found[1] if found else []
    said = [line for line in prose if line.startswith("ERROR:")] or list(prose)
    if pushed and said and (_PUSH.search(said[-1]) or (found and found[0].name.startswith("pushing "))):
        return _push_failed(pushed[0], _why(said[-1]))
    if any(_FULL.search(line) for line in (*log, *prose, (found[0].error or "") if found else "")):
        where = f" in {_cut(found[0].name)}" if found else ""
        first = f"build {target}: the engine's disk is full{where}; fix: free space there, such as docker builder prune"
    elif found:
        step = found[0]
        first = f"build {target}: step {_cut(step.name)} failed after {step.seconds:.1f} s: {_why(step.error or '')}"
    else:
        first = f"build {target}: {_why(said[-1]) if said else 'failed without a message'}"
    return UserError([plain(first), *(f"  | {line}" for line in log)], FAILED)


def passing(error: UserError) -> bool:
    """Whether this is a push that may succeed when it is tried again."""
    line = error.problems[0]
    return line.startswith("push = ") and error.exit_code == FAILED and line.endswith(_GO_ON)


def _push_failed(ref: str, answer: str) -> UserError:
    reference = parse(ref)
    host, repository = reference.registry, reference.repository
    answer = without_queries(answer)
    words = _NAMES.sub("", answer.replace(reference.name, "").replace(f"/v2/{repository}/", "/v2/"))
    missing = ecr.missing(host, repository) if ecr.region_of(host) else "make the repository, or see its spelling"
    for signs, why, fix, code in _REFUSALS:
        if re.search(signs, words, re.IGNORECASE):
            fix = fix.format(host=host, repository=repository, missing=missing)
            return UserError(problem("push", ref, f"{why}: {answer}", fix=fix), code)
    return UserError(problem("push", ref, answer, fix=_GO_ON if _PASSING.search(words) else ""), FAILED)


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST_STEP else name[:_LONGEST_STEP] + "…"


def _why(error: str) -> str:
    """Return the error without the command, which the step's name has already."""
    short = re.sub(r"^(ERROR: )?(target [\w-]+: )?(failed to solve: )?", "", " ".join(error.split()))
    ended = re.fullmatch(r'process ".*" did not complete successfully: (exit code: \d+.*)', short)
    return (ended[1].replace("exit code:", "exit code") if ended else short)[:500]
