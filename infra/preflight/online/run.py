"""The caller's identity, and all online rules run at once."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import datetime

from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError, NoRegionError
from botocore.parsers import ResponseParserError

from infra import clock
from infra.aws import EXPIRED, NO_ONE, Aws, NotAwsError, code_of
from infra.config import ClusterSpec
from infra.finding import Rule, finding
from infra.plan.place import Arn, Place
from infra.preflight.offline import OFFLINE, SUPPRESSIONS, check_offline, suppress
from infra.preflight.online import access, capacity, instances, leftovers, network, scheduler, storage, watch
from infra.preflight.online.answers import WHOLE, check_online, unknown
from infra.preflight.report import UNREACHED
from infra.preflight.rule import Context
from lustrain.problem import Problem, UserError

ONLINE: Mapping[str, Rule] = {
    rule.code: rule
    for family in (
        instances.RULES,
        scheduler.RULES,
        capacity.RULES,
        network.RULES,
        storage.RULES,
        access.RULES,
        leftovers.RULES,
        watch.RULES,
    )
    for rule in family
}
AT_ONCE = 8
PATIENCE_S = 90.0
"""For all rules together; ours. SageMaker's quotas alone are some thirty pages."""


def whoami(aws: Aws) -> Place | None:
    """Return account and partition of the credentials; None when AWS cannot be reached.

    UserError in one line for missing, wrong and expired credentials.
    """
    try:
        arn = aws.sts.get_caller_identity()["Arn"]
    except ClientError as error:
        raise UserError(_refused(error)) from None
    except (ConnectionError, HTTPClientError, ResponseParserError):
        return None
    except NotAwsError as error:
        fix = "look at the proxy, at AWS_ENDPOINT_URL and at endpoint_url of the profile"
        raise UserError(f"AWS cannot be reached: {error}; fix: {fix}") from None
    except NoRegionError:
        raise UserError("no region: fix: set aws:region in Pulumi.<stack>.yaml") from None
    except BotoCoreError as error:
        fix = "run `aws sso login` or `aws configure`, or set AWS_PROFILE"
        raise UserError(f"AWS credentials: {str(error).rstrip('.')}; fix: {fix}") from None
    caller = Arn.parse(arn)
    return Place(aws.region, caller.account, caller.partition)


def run_all(spec: ClusterSpec, aws: Aws, now: datetime | None = None) -> list[Problem]:
    """Return offline and online findings together, errors first, suppressed ones left out."""
    place = whoami(aws)
    now = now or clock.now()
    context = Context.at(spec, place, now) if place else Context.of_region(spec, aws.region, now)
    problems = check_offline(context)
    if place is None:
        nothing = finding(WHOLE, UNREACHED, "look at network, proxy and AWS_ENDPOINT_URL", level="unknown")
        problems += [rule.label(nothing) for rule in ONLINE.values()]
    else:
        problems += ask_all(context, aws)
    return suppress(spec, problems, {**OFFLINE, **SUPPRESSIONS, **ONLINE})


def ask_all(context: Context, aws: Aws, patience_s: float = PATIENCE_S) -> list[Problem]:
    """Return what the online rules find, several at a time; one without an answer in time is unknown."""
    pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="preflight")
    pending: dict[Future[list[Problem]], Rule] = {
        pool.submit(check_online, rule, context, aws): rule for rule in ONLINE.values()
    }
    done, late = wait(pending, timeout=patience_s)
    pool.shutdown(wait=False, cancel_futures=True)
    problems = [problem for future in pending if future in done for problem in future.result()]
    nothing = unknown(WHOLE, f"no answer within {patience_s:g} s", "try again later")
    return problems + [pending[future].label(nothing) for future in pending if future in late]


def _refused(error: ClientError) -> str:
    code = code_of(error)
    if code in EXPIRED:
        return "AWS credentials: the token has expired; fix: log in again (`aws sso login`, or new session credentials)"
    if code in NO_ONE:
        return f"AWS credentials: AWS does not know them ({code}); fix: run `aws configure`, or set AWS_PROFILE"
    return f"AWS credentials: STS answers {code}; fix: try `aws sts get-caller-identity`"
