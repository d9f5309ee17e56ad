"""Online rules over answers that botocore's own model accepts; who gets no answer says unknown, never nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import boto3
import botocore.loaders
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError, ReadTimeoutError
from botocore.stub import Stubber

from infra.aws import Aws
from infra.catalog.botocore_data import hyperpod_types, partitions, regions
from infra.catalog.instances import instance
from infra.local.aws import LocalAws
from infra.plan.place import Place, dns_suffix, partition_of
from infra.preflight.offline import LAST_OFFLINE
from infra.preflight.online.answers import check_online
from infra.preflight.online.instances import quota_of
from infra.preflight.online.run import ONLINE, ask_all, run_all, whoami
from infra.preflight.rule import Context
from lustrain.problem import UserError
from tests.infra.edits import GONE, place, spec_of
from tests.infra.mistakes import EKS, KEY, NOW, SLURM, SPOT
from tests.infra.online_cases import (
    BOUNDED,
    BUCKETS,
    CASES,
    CONTROL,
    IMAGE,
    LUSTRE,
    THEIRS,
    Answer,
    Case,
    encrypted,
    within_boundary,
)


def aws_that_says(answers: Sequence[Answer], region: str = "us-east-1") -> Aws:
    """Clients that answer each service's questions in this order."""
    clients: dict[str, Any] = {}
    for service, method, answer in answers:
        if service not in clients:
            clients[service] = client(service, region)
            if hasattr(clients[service], "stubber"):
                clients[service].stubber.deactivate()
            clients[service].stubber = Stubber(clients[service])
            clients[service].stubber.activate()
        if isinstance(answer, str):
            status = int(answer) if answer.isdecimal() else 400
            clients[service].stubber.add_client_error(method, answer, "as planted", status)
        else:
            clients[service].stubber.add_response(method, answer)
    return Aws(region, lambda service: clients[service])


@cache
def client(service: str, region: str = "us-east-1") -> Any:
    """One for all tests: making a client takes longer than most of them."""
    return boto3.client(service, region_name=region, aws_access_key_id="a", aws_secret_access_key="b")  # type: ignore[call-overload]


def broken(error: Exception) -> Aws:
    """Every question ends with this error."""

    class Client:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            def fail(*_: Any, **__: Any) -> Any:
                raise error

            return fail

    return Aws("us-east-1", lambda service: Client())


DOWN = broken(EndpointConnectionError(endpoint_url="https://ec2.us-east-1.amazonaws.com"))


def context(stack: str, edits: dict[str, Any]) -> Context:
    """The example without its monitor, of which AWS would be asked too, unless the edits say otherwise."""
    without = {"observability": GONE} if spec_of(stack, {}).monitor else {}
    return Context.at(spec_of(stack, {**without, **edits}), place(stack), NOW)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_answer_is_judged(case: Case) -> None:
    aws = aws_that_says(case.answers, place(case.stack).region)
    found = check_online(ONLINE[case.code], context(case.stack, case.edits), aws)
    told = {(finding.path, finding.level) for finding in found}
    assert told == ({(case.path, case.level)} if case.path else set()), list(found)
    assert all(finding.fix and finding.code == case.code for finding in found)


def test_bare_key_id_of_a_bucket_comes_as_an_arn() -> None:
    aws = aws_that_says([encrypted(KEY.rpartition("/")[2])], place(SPOT).region)
    (found,) = check_online(ONLINE["DRA-101"], context(SPOT, THEIRS), aws)
    assert found.fix.startswith(f"set kms_key: {place(SPOT).arn('kms', KEY.rpartition(':')[2])};")


def test_every_online_rule_has_a_good_and_a_bad_answer() -> None:
    assert {case.code for case in CASES if case.path} == {case.code for case in CASES if not case.path} == set(ONLINE)
    assert all(int(code[-3:]) > LAST_OFFLINE and rule.permission for code, rule in ONLINE.items())


@pytest.mark.parametrize("code", sorted(ONLINE))
@pytest.mark.parametrize(
    "answer", ["AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "Throttling", "InternalError"]
)
def test_a_refused_question_is_unknown(code: str, answer: str) -> None:
    case = next(case for case in CASES if case.code == code)
    answers = [(service, method, answer) for service, method, _ in case.answers]
    if code in ("S3-101", "S3-102"):
        answers = [("s3", "head_bucket", "403")] * 3
    aws = aws_that_says(answers, place(case.stack).region)
    found = check_online(ONLINE[code], context(case.stack, case.edits), aws)
    assert found
    if code != "EC2-103" or answer == "UnauthorizedOperation":
        assert {finding.level for finding in found} == {"unknown"}


PAGE = b"<!DOCTYPE html>\n<html><head><title>Portal</title></head><body>Log in &amp; pay</body></html>"


class Portal(BaseHTTPRequestHandler):
    """Answers every question with a page for people, as a proxy does that wants a log-in."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(PAGE)

    do_POST = do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Nothing on the test's stderr."""


@pytest.fixture
def portal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Portal) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()


@pytest.mark.slow
def test_page_in_place_of_answer_is_one_line_and_never_printed(portal: None) -> None:
    with pytest.raises(
        UserError, match=r"an HTML page \(status 200\) came in place of an answer to GetCallerId"
    ) as caught:
        run_all(spec_of(SPOT, {}), Aws("us-east-1"), NOW)
    assert len(caught.value.problems) == 1
    for stack, edits in ((SPOT, {**LUSTRE, **IMAGE, **BUCKETS}), (EKS, CONTROL)):
        found = ask_all(context(stack, edits), Aws("us-east-1"))
        assert not [one for one in found if "<" in one or "Portal" in one]
        assert {one.level for one in found} == {"unknown"}


def test_a_time_out_of_one_question_is_unknown() -> None:
    aws = broken(ReadTimeoutError(endpoint_url="https://ec2.us-east-1.amazonaws.com"))
    assert [one.level for one in check_online(ONLINE["NET-101"], context(SPOT, {}), aws)] == ["unknown"]


@pytest.mark.parametrize("code", ["NET-101", "EC2-103"])
def test_a_page_as_the_message_of_an_error_is_not_printed(code: str) -> None:
    error = ClientError({"Error": {"Code": "503", "Message": PAGE.decode()}}, "Any")
    found = check_online(ONLINE[code], context(SPOT, {}), broken(error))
    assert found
    assert all("an HTML page" in one and "<" not in one for one in found)


def test_spot_prices_are_of_the_last_days_whatever_the_rules_day() -> None:
    """AWS has no prices of next year."""

    class Recorder:
        def get_paginator(self, _: str) -> Recorder:
            return self

        def paginate(self, **asked: Any) -> list[Any]:
            self.asked = asked
            return []

    ec2 = Recorder()
    later = Context.at(spec_of(SPOT, {}), place(SPOT), datetime.now(UTC) + timedelta(days=365))
    list(ONLINE["CAP-106"].check(later, Aws("us-east-1", lambda _: ec2)))
    assert ec2.asked["StartTime"] < datetime.now(UTC)


def test_boundary_is_simulated_with_the_roles_own_policy() -> None:
    asked: dict[str, Any] = {}
    real = aws_that_says(within_boundary()).iam

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def get_paginator(self, name: str) -> Any:
            def paginate(**request: Any) -> list[Any]:
                asked.setdefault(name, request)
                return []

            return SimpleNamespace(paginate=paginate)

    check_online(ONLINE["IAM-105"], context(SPOT, BOUNDED), Aws("us-east-1", lambda _: Recorder()))
    request = asked["simulate_custom_policy"]
    assert json.loads(request["PermissionsBoundaryPolicyInputList"][0])["Statement"] == []
    assert request["ActionNames"] == json.loads(request["PolicyInputList"][0])["Statement"][0]["Action"]


def test_missing_permission_names_the_permission() -> None:
    aws = aws_that_says([("ec2", "describe_availability_zones", "UnauthorizedOperation")])
    (finding,) = check_online(ONLINE["NET-101"], context(SPOT, {}), aws)
    assert "ec2:DescribeAvailabilityZones" in finding.fix


def test_a_network_that_is_down_makes_all_unknown_and_nothing_ok() -> None:
    found = run_all(spec_of(SPOT, {}), DOWN, NOW)
    assert {finding.code for finding in found} == set(ONLINE)
    assert {finding.level for finding in found} == {"unknown"}


class OnlyZones:
    """An EC2 that has no zones, and is down for every other question."""

    def describe_availability_zones(self, **_: Any) -> dict[str, Any]:
        return {"AvailabilityZones": []}

    def __getattr__(self, name: str) -> Any:
        return getattr(DOWN.ec2, name)


def test_all_rules_see_credentials_account_and_lose_no_answer() -> None:
    me = {"Arn": "arn:aws:iam::210987654321:user/me"}
    clients: dict[str, Any] = {"sts": aws_that_says([("sts", "get_caller_identity", me)]).sts, "ec2": OnlyZones()}
    aws = Aws(place(SLURM).region, lambda service: clients.get(service, DOWN.ec2))
    findings = run_all(spec_of(SLURM, {}), aws, NOW)
    found = {(finding.code, finding.level) for finding in findings}
    assert {("NET-101", "error"), ("EC2-101", "unknown"), ("CAP-008", "error")} <= found
    (plan,) = [finding for finding in findings if finding.code == "CAP-008"]
    assert plan.why == "the plan is account 123456789012's, this is 210987654321"


def test_partitions_and_their_suffixes_are_those_of_botocore() -> None:
    for partition in botocore.loaders.create_loader().load_data("partitions")["partitions"]:
        assert dns_suffix(partition["id"]) == partition["outputs"]["dnsSuffix"]
        assert {partition_of(name) for name in partition["regions"] if "global" not in name} == {partition["id"]}


def test_the_regions_are_those_of_botocore() -> None:
    session = boto3.Session()
    # Its pseudo regions for global services are not places.
    known = {region for one in partitions() for region in session.get_available_regions("ec2", one)}
    assert known == regions()


def test_rule_without_a_timely_answer_is_unknown_others_stay() -> None:
    waiting = threading.Event()

    class Slow:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            def wait(*_: Any, **__: Any) -> Any:
                waiting.wait()
                raise EndpointConnectionError(endpoint_url="late")

            return wait

    try:
        found = ask_all(context(SPOT, {}), Aws("us-east-1", lambda service: Slow()), patience_s=0.2)
    finally:
        waiting.set()
    assert "NET-101" in {finding.code for finding in found}
    assert {finding.level for finding in found} == {"unknown"}


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("ExpiredToken", "expired"),
        ("InvalidClientTokenId", "does not know"),
        ("ServiceUnavailable", "ServiceUnavailable"),
        ("", "credentials"),
    ],
)
def test_refused_or_missing_credentials_are_one_line_with_a_fix(code: str, word: str) -> None:
    aws = aws_that_says([("sts", "get_caller_identity", code)]) if code else broken(NoCredentialsError())
    with pytest.raises(UserError, match=word) as caught:
        whoami(aws)
    (line,) = caught.value.problems
    assert "fix: " in line


@pytest.mark.parametrize(
    ("arn", "expected"),
    [
        ("arn:aws:iam::123456789012:user/me", Place("us-east-1", "123456789012")),
        ("arn:aws-cn:sts::123456789012:assumed-role/a/b", Place("us-east-1", "123456789012", "aws-cn")),
    ],
)
def test_account_and_partition_come_from_the_credentials(arn: str, expected: Place) -> None:
    assert whoami(aws_that_says([("sts", "get_caller_identity", {"Arn": arn})])) == expected


@pytest.mark.parametrize(
    ("family", "spot", "expected"),
    [
        ("p5", False, "Running On-Demand P instances"),
        ("p5", True, "All P5 Spot Instance Requests"),
        ("p4d", True, "All P4, P3 and P2 Spot Instance Requests"),
        ("g6e", False, "Running On-Demand G and VT instances"),
        ("c5n", False, "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances"),
        ("trn2", False, "Running On-Demand Trn instances"),
        ("hpc7a", False, "Running On-Demand HPC instances"),
        ("inf2", True, "All Inf Spot Instance Requests"),
        ("dl1", False, None),
    ],
)
def test_a_family_counts_against_its_own_quota(family: str, spot: bool, expected: str | None) -> None:
    kinds = ("Standard (A, C, D, H, I, M, R, T, Z)", "P", "G and VT", "Trn", "HPC")
    names = [f"Running On-Demand {kind} instances" for kind in kinds]
    names += [f"All {kind} Spot Instance Requests" for kind in ("P4, P3 and P2", "P5", "G and VT", "Inf")]
    assert quota_of(family, spot, names) == expected


def test_the_types_that_hyperpod_takes_are_those_of_its_api() -> None:
    model = client("sagemaker").meta.service_model
    assert frozenset(model.shape_for("ClusterInstanceType").enum) == hyperpod_types()
    assert instance("ml.p5.48xlarge") is not None


@pytest.mark.slow
def test_every_rule_ends_against_the_embedded_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalAws() as local:
        for name, value in local.environment.items():
            monkeypatch.setenv(name, value)
        found = run_all(spec_of(SPOT, {}), Aws("us-east-1"), NOW)
    assert "BUD-001" not in {finding.code for finding in found}
    assert {finding.code: finding.why for finding in found} == {
        "EC2-102": "could not be checked: the embedded AWS does not implement service-quotas ListServiceQuotas",
        "CAP-107": "could not be checked: the embedded AWS does not implement ec2 GetSpotPlacementScores",
    }
    assert all(finding.fix for finding in found)
