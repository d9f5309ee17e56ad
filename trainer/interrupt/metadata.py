"""The EC2 instance metadata service (IMDSv2 only): spot, rebalance and Auto Scaling notices.

Sources:
- session tokens, at most 21,600 s, 401 when expired, hop limit in containers:
  https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instance-metadata-v2-how-it-works.html
- `spot/instance-action` = {"action", "time"} in UTC, 404 until then, two minutes ahead, best effort:
  https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
- `events/recommendations/rebalance` = {"noticeTime"}, no deadline:
  https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/rebalance-recommendations.html
- `autoscaling/target-lifecycle-state`, `Terminated` before the instance goes:
  https://docs.aws.amazon.com/autoscaling/ec2/userguide/retrieving-target-lifecycle-state-through-imds.html
- `instance-id`:
  https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-categories.html
- the environment variables and the default endpoints:
  https://docs.aws.amazon.com/sdkref/latest/guide/feature-imds-credentials.html
"""

from __future__ import annotations

import email.utils
import http.client
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from lustrain.problem import problem
from trainer.config import parse_time
from trainer.interrupt.notice import Notice, OnEvent, nearer
from trainer.interrupt.outage import Outage

ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
MODE_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE"
DISABLED_VARIABLE = "AWS_EC2_METADATA_DISABLED"
DEFAULT_ENDPOINTS = {"ipv4": "http://169.254.169.254", "ipv6": "http://[fd00:ec2::254]"}

TOKEN_PATH = "/latest/api/token"
SPOT_PATH = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
INSTANCE_PATH = "/latest/meta-data/instance-id"
LIFECYCLE_PATH = "/latest/meta-data/autoscaling/target-lifecycle-state"

TOKEN_TTL_S = 21600
TIMEOUT_S = 1.0
"""The service is link-local and answers in about a millisecond; no answer within a second means that it is absent."""
SPOT_WARNING_S = 120.0
"""A spot notice comes at most two minutes ahead: the bound where only this machine's clock can tell the remaining time."""
LONGEST_BODY = 4096


@dataclass(frozen=True)
class Response:
    """One HTTP answer; `sent` is the monotonic time of the request, `server_time` the Date header in Unix seconds."""

    status: int
    body: str
    sent: float
    server_time: float | None


class MetadataSilentError(Exception):
    """The service does not answer, or not as it should; the message is fit for a warning."""


def endpoint(environ: Mapping[str, str]) -> str:
    """Return the service's URL without a trailing slash: from the variable, else the default of the mode."""
    mode = environ.get(MODE_VARIABLE, "").lower() or "ipv4"
    return (environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINTS.get(mode, DEFAULT_ENDPOINTS["ipv4"])).rstrip("/")


def endpoint_problems(environ: Mapping[str, str]) -> Sequence[str]:
    """Check the environment variables that choose the endpoint; one line a problem."""
    problems = []
    mode = environ.get(MODE_VARIABLE, "")
    if mode and mode.lower() not in DEFAULT_ENDPOINTS:
        problems.append(problem(MODE_VARIABLE, mode, "unknown mode", allowed="IPv4, IPv6"))
    url = endpoint(environ)
    try:
        parts = urlsplit(url)
        usable = parts.scheme == "http" and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:
        usable = False
    if not usable:
        problems.append(problem(ENDPOINT_VARIABLE, url, "is not an http:// address", fix="e.g. http://127.0.0.1:1338"))
    return problems


def spot_deadline(action_time: str, answer: Response, local_time: float) -> float | None:
    """Return the monotonic seconds of the announced time, never later than it; None when the time cannot be read.

    The announcement and the Date header come from the same clock, so their difference is right however wrong the
    local clock is. The header counts whole seconds, downwards: the server may be up to 1 s further, which is taken
    off. Without the header the local clock must do, within the bounds of what a spot notice can be.
    """
    try:
        announced = parse_time(action_time)
    except ValueError:
        return None
    if answer.server_time is not None:
        return answer.sent + announced - answer.server_time - 1.0
    return answer.sent + min(max(announced - local_time, 0.0), SPOT_WARNING_S)


class Metadata:
    """Polls the service over connections of its own, past any proxy; a silent service is a warning, never a notice.

    With AWS_EC2_METADATA_DISABLED=true no request is sent, and one warning says so.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        rebalance: bool,
        monotonic: Callable[[], float],
        wall_clock: Callable[[], float],
        on_event: OnEvent,
    ) -> None:
        self._endpoint = endpoint(environ)
        self._disabled = environ.get(DISABLED_VARIABLE, "").strip().lower() == "true"
        self._rebalance = rebalance
        self._monotonic = monotonic
        self._wall_clock = wall_clock
        self._outage = Outage("metadata", on_event)
        self._garbled = Outage("metadata", on_event)
        self._token = ""
        self._token_until = 0.0
        self._spot_seen: tuple[str, Notice] | None = None
        self._old_recommendation: str | None = None
        self._recommended = Outage("metadata", on_event)
        self._instance_id: str | None = None

    def poll(self) -> Notice | None:
        if self._disabled:
            self._outage.failed(f"{DISABLED_VARIABLE} is true: no spot, rebalance or Auto Scaling notice will be seen")
            return None
        try:
            notice = nearer(self._spot(), self._lifecycle())
            notice = nearer(notice, self._recommendation()) if self._rebalance else notice
        except MetadataSilentError as error:
            self._outage.failed(str(error))
            return self._spot_seen[1] if self._spot_seen else None
        self._outage.worked()
        return notice

    def instance_id(self) -> str | None:
        """Return this instance's id, None where the service does not tell: the notice matters more."""
        if self._instance_id is None and not self._disabled:
            try:
                answer = self._get(INSTANCE_PATH)
            except MetadataSilentError:
                return None
            self._instance_id = answer.body.strip()[:64] if answer else None
        return self._instance_id

    def _spot(self) -> Notice | None:
        answer = self._get(SPOT_PATH)
        if answer is None:
            return None
        if self._spot_seen and self._spot_seen[0] == answer.body:
            return self._spot_seen[1]
        try:
            item = json.loads(answer.body)
            action, when = str(item["action"]), str(item["time"])
        except (ValueError, KeyError, TypeError, RecursionError):
            self._garbled.failed(f"{SPOT_PATH} answers {answer.body[:80]!r}, which is not an instance action")
            return None
        deadline = spot_deadline(when, answer, self._wall_clock())
        notice = Notice("spot", f"{action} at {when}", deadline, self.instance_id())
        self._spot_seen = (answer.body, notice)
        return notice

    def _recommendation(self) -> Notice | None:
        """One from before this start is no notice: it stays for as long as the instance does, perhaps for weeks, and a launcher
        that starts exit code 85 again would restore and stop forever."""
        answer = self._get(REBALANCE_PATH)
        body = "" if answer is None else answer.body
        if self._old_recommendation is None:
            self._old_recommendation = body
            if body:
                self._recommended.failed(f"rebalance was recommended before this start, which goes on: {body[:80]}")
        if body in ("", self._old_recommendation):
            return None
        return Notice("rebalance", f"recommended: {body[:80]}", None, self.instance_id())

    def _lifecycle(self) -> Notice | None:
        answer = self._get(LIFECYCLE_PATH)
        if answer is None or answer.body.strip() != "Terminated":
            return None
        return Notice("autoscaling", "target lifecycle state is Terminated", None, self.instance_id())

    def _get(self, path: str) -> Response | None:
        """Request an item; None where it does not exist. A token that the service no longer accepts is renewed once."""
        for _ in range(2):
            answer = self._request("GET", path, {"X-aws-ec2-metadata-token": self._live_token()})
            if answer.status != 401:
                break
            self._token = ""
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise MetadataSilentError(f"{self._endpoint}{path} answers {answer.status}")
        return answer

    def _live_token(self) -> str:
        if self._token and self._monotonic() < self._token_until:
            return self._token
        requested = self._monotonic()
        try:
            answer = self._request("PUT", TOKEN_PATH, {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)})
        except MetadataSilentError as error:
            raise MetadataSilentError(f"{error}{self._hop_limit_hint()}") from error
        if answer.status != 200 or not answer.body.isascii() or not answer.body.isprintable():
            raise MetadataSilentError(f"{self._endpoint}{TOKEN_PATH} answers {answer.status} without a token")
        self._token = answer.body
        self._token_until = requested + 0.9 * TOKEN_TTL_S
        return self._token

    def _hop_limit_hint(self) -> str:
        """Name the hop limit as the cause where it is: with 1, containers get other answers but never the token's."""
        try:
            self._request("GET", LIFECYCLE_PATH, {})
        except MetadataSilentError:
            return ""
        return "; other answers arrive, so the hop limit is too low for containers: set HttpPutResponseHopLimit to 2"

    def _request(self, method: str, path: str, headers: dict[str, str]) -> Response:
        parts = urlsplit(self._endpoint)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=TIMEOUT_S)
        sent = self._monotonic()
        try:
            connection.request(method, parts.path + path, headers=headers)
            response = connection.getresponse()
            body = response.read(LONGEST_BODY).decode("utf-8", errors="replace")
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise MetadataSilentError(f"{self._endpoint}{path} does not answer: {reason}") from error
        finally:
            connection.close()
        return Response(response.status, body, sent, _unix(response.getheader("Date")))


def _unix(date: str | None) -> float | None:
    if date is None:
        return None
    try:
        return email.utils.parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None
