"""Findings of online rules where AWS gives no answer, and questions that several of them share."""

from __future__ import annotations

from collections.abc import Mapping

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from infra.aws import DENIED, NOT_IMPLEMENTED, Aws, code_of
from infra.finding import Rule, finding
from infra.preflight.rule import Context
from lustrain.problem import LONGEST_VALUE, Problem, without_page


def quotas_of(aws: Aws, service: str) -> Mapping[str, float]:
    """Return the account's quotas of a service by their names."""

    def read() -> dict[str, float]:
        pages = aws.quotas.get_paginator("list_service_quotas").paginate(ServiceCode=service)
        return {quota["QuotaName"]: quota["Value"] for page in pages for quota in page["Quotas"]}

    return aws.once(("quotas", service), read)  # type: ignore[no-any-return]


def unknown(path: str, why: str, fix: str) -> Problem:
    """Return the finding of a rule that could not look."""
    why = without_page(why)
    short = why if len(why) <= LONGEST_VALUE else why[:LONGEST_VALUE] + "…"
    return finding(path, f"could not be checked: {short}", fix, level="unknown")


def missing(path: str, what: str, fix: str = "correct it") -> Problem:
    """Return the finding about something that the config names and AWS does not know."""
    return finding(path, f"{what} is not in this account and region", fix)


def check_online(rule: Rule, context: Context, aws: Aws) -> list[Problem]:
    """Return what the rule finds, or one line that says why AWS gave no answer; no answer never counts as a pass."""
    try:
        return list(rule.check(context, aws))
    except ClientError as error:
        failure = _refused(error, rule.permission)
    except (BotoCoreError, ResponseParserError) as error:
        failure = unknown(WHOLE, str(error), "try again, or look at network and endpoint settings")
    return [rule.label(failure)]


def _refused(error: ClientError, permission: str) -> Problem:
    code = code_of(error)
    if code in DENIED:
        return unknown(WHOLE, "permission is missing", f"allow {permission}")
    message = str(error.response.get("Error", {}).get("Message", "")) or code
    if code == NOT_IMPLEMENTED:
        return unknown(WHOLE, message, f"ask AWS itself; the question is {permission}")
    fix = f"try again, or look in the console; the question is {permission}"
    return unknown(WHOLE, f"AWS answers {code}: {without_page(message)}", fix)


WHOLE = "aws"
"""Path of a finding about AWS as a whole, not about a key."""
