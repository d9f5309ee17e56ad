"""HTTP with one registry: TLS, credentials, redirects and retries.

https://distribution.github.io/distribution/spec/auth/token/ describes how tokens are requested.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from http.client import responses
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import parse_http_list, parse_keqv_list

import requests
from requests.utils import get_environ_proxies
from urllib3 import Retry
from urllib3.exceptions import HTTPError, InvalidHeader

from images.model import DOCKER_HUB
from images.plan.references import Reference, is_loopback
from images.registry import ecr
from images.registry.credentials import Credentials, for_registry
from images.registry.refusals import GO_ON, refusal, without_queries
from lustrain.backoff import pause_s
from lustrain.problem import FAILED, UNREACHABLE, UserError, problem

log = logging.getLogger(__name__)

TIMEOUT_S = (10.0, 60.0)
"""So long may connecting take, and the pause between two pieces of an answer."""
TRIES = 6
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 15.0
LONGEST_RETRY_AFTER_S = 60.0
NAME_TRIES = 3
"""A host name that does not exist is tried so often. When the name service fails, there are as many tries as for anything
else."""
HOPS = 5
AGAIN = (429, 500, 502, 503, 504)
LONGEST = 16 << 20
"""An answer has at most so many bytes; manifests and configurations are far smaller."""
_HUB_HOST = "registry-1.docker.io"
_CERTIFICATES = Path("/etc/docker/certs.d")


class Response(NamedTuple):
    """An answer of a registry, with its whole body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Transport:
    """Sends requests to one registry, with retries. A final failure is a UserError in one line, without a secret.

    `find` gives the credentials of a host; it is called again when they are refused.
    """

    def __init__(self, host: str, find: Callable[[str], Credentials | None] = for_registry) -> None:
        self.host = host
        self.credentials = find(host)
        self._find = find
        self._session = _Session(host)
        self._scheme = "" if is_loopback(host) else "https"
        self._authorizations: dict[str, str] = {}
        self._warned = False

    def request(
        self,
        method: str,
        reference: Reference,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        good: tuple[int, ...] = (200,),
    ) -> Response:
        """Return the answer to a request for a `path` in the reference's repository, with one of the `good` statuses."""
        path, tried, tries = f"/v2/{reference.repository}/{path}", 0, TRIES
        while tried < tries:
            tried, pause = tried + 1, None
            try:
                answer = self._try(method, reference, path, dict(headers or {}), body)
            except (requests.RequestException, HTTPError, OSError) as error:
                cause = _root(error)
                why = self._broken(error, cause, reference)
                unknown = isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME
                tries = NAME_TRIES if unknown else TRIES
            else:
                if answer.status in good:
                    return answer
                why, pause = self._words(answer), _retry_after(answer.headers)
                if answer.status not in AGAIN:
                    text = f"{method} request to {path}: {why}"
                    raise self._refusal(reference, text) or self._error(text)
            if tried < tries:
                self._wait(tried, pause, why)
        raise self._error(f"no usable answer to {method} {path} in {tried} tries: {why}", GO_ON, UNREACHABLE)

    def _try(
        self, method: str, reference: Reference, path: str, headers: dict[str, str], body: bytes | None
    ) -> Response:
        try:
            with self._authorized(method, path, f"{reference.repository} {method}", headers, body) as response:
                content = response.raw.read(LONGEST + 1, decode_content=True)
        except requests.TooManyRedirects:
            raise self._error(f"more than {HOPS} redirects in a row") from None
        except requests.exceptions.InvalidURL:
            raise UserError(problem("registry", self.host, "not an address")) from None
        if len(content) > LONGEST:
            raise self._error(f"{path} is longer than {LONGEST} bytes")
        return Response(response.status_code, response.headers, content)

    def _broken(self, error: Exception, cause: BaseException, reference: Reference) -> str:
        """Return why there is no answer; UserError where no second try helps."""
        # While it is not known whether the registry speaks TLS, a broken handshake may come from its restart.
        known = self._scheme or "CERTIFICATE" in str(cause)
        if known and isinstance(cause, ssl.SSLError) and (final := self._refusal(reference, str(cause))):
            raise final from None
        why = without_queries(getattr(cause, "strerror", None) or str(cause) or type(cause).__name__)
        return f"the proxy refuses: {why}" if isinstance(error, requests.exceptions.ProxyError) else why

    def _error(self, why: str, fix: str = "", code: int = FAILED) -> UserError:
        return UserError(problem("registry", self.host, why, fix=fix), code)

    def _wait(self, tried: int, retry_after: float | None, why: str) -> None:
        """Pause before the next try; the reason is logged once."""
        if not self._warned:
            log.warning("%s: %s; trying again", self.host, why)
            self._warned = True
        pause = pause_s(tried, FIRST_PAUSE_S, LONGEST_PAUSE_S)
        time.sleep(max(pause, min(retry_after or 0, LONGEST_RETRY_AFTER_S)))

    def _authorized(
        self, method: str, path: str, scope: str, headers: dict[str, str], body: bytes | None
    ) -> requests.Response:
        """Send a request; a challenge is answered, and with new credentials where the first were refused.

        `scope` tells apart what tokens are good for.
        """
        url, renewed = f"{self._base()}{path}", False
        while True:
            if sent := self._authorizations.get(scope):
                headers["Authorization"] = sent
            answer = self._session.send_to(method, url, headers=headers, data=body)
            # An ECR says 403 as well where a token has ended.
            if answer.status_code != 401 and not (answer.status_code == 403 and ecr.region_of(self.host)):
                return answer
            challenge = answer.headers.get("WWW-Authenticate") or ("Basic" if sent else "")
            new = None if sent else self._answer_to(challenge)
            if new is None and not renewed:
                renewed = True
                self.credentials = self._find(self.host) or self.credentials
                new = self._answer_to(challenge)
            if new is None or new == sent:
                return answer
            answer.close()
            self._authorizations[scope] = new

    def _answer_to(self, challenge: str) -> str | None:
        """Return what to put into Authorization; None where there is nothing that answers the challenge."""
        kind, _, rest = challenge.partition(" ")
        if kind.lower() == "bearer":
            return self._token({name: value or "" for name, value in parse_keqv_list(parse_http_list(rest)).items()})
        if kind.lower() != "basic" or self.credentials is None or self.credentials.identity_token:
            return None
        return f"Basic {self.credentials.basic}"

    def _token(self, challenge: Mapping[str, str]) -> str | None:
        """Return a token of the service that the registry names; None where it refuses."""
        realm, credentials = challenge.get("realm", ""), self.credentials
        query = {name: challenge[name] for name in ("service", "scope") if challenge.get(name)}
        if credentials is not None and credentials.identity_token:
            form = {**query, "grant_type": "refresh_token", "client_id": "lustrain"}
            form["refresh_token"] = credentials.identity_token
            answer = self._session.send_to("POST", realm, data=form)
        else:
            headers = {} if credentials is None else {"Authorization": f"Basic {credentials.basic}"}
            answer = self._session.send_to("GET", realm, headers=headers, params=query)
        with answer:
            if answer.status_code in AGAIN:
                raise requests.ConnectionError(f"the token service answered {answer.status_code}")
            try:
                document = answer.json() if answer.status_code == 200 else {}
                return f"Bearer {document.get('token') or document['access_token']}"
            except (ValueError, KeyError, AttributeError):
                return None

    def _base(self) -> str:
        if self.host == DOCKER_HUB:
            return f"https://{_HUB_HOST}"
        if not self._scheme:
            # Without TLS first: servers with TLS say so at once, while some without it wait for the rest of a handshake.
            try:
                with self._session.send_to("GET", f"http://{self.host}/v2/") as answer:
                    tls = answer.status_code == 400 and b"HTTPS" in answer.raw.read(LONGEST)
                    self._scheme = "https" if tls else "http"
            except requests.ConnectionError:
                # TLS, or nothing answers.
                return f"https://{self.host}"
        return f"{self._scheme}://{self.host}"

    def _refusal(self, reference: Reference, answer: str) -> UserError | None:
        who = "the credentials"
        if self.credentials is None:
            who = "requests without credentials, and none for it were found"
        elif self.credentials.username:
            who = f"the credentials of user {self.credentials.username!r}"
        return refusal("registry", self.host, answer, reference, who)

    def _words(self, answer: Response) -> str:
        """Return the status and the registry's own words, https://distribution.github.io/distribution/spec/api/#errors"""
        try:
            errors = json.loads(answer.body)["errors"]
            words = "; ".join(f"{error.get('code')} {error.get('message') or ''}".strip() for error in errors)
        except (ValueError, LookupError, TypeError, AttributeError):
            # The status alone is an answer.
            words = responses.get(answer.status, "")
        hidden = self.credentials.hide(words) if self.credentials else words
        return f"{answer.status} {without_queries(hidden)[:300]}".strip()


class _Session(requests.Session):
    """It sends requests with TLS only, also redirected ones; those to another host go without credentials."""

    def __init__(self, host: str) -> None:
        super().__init__()
        self._host = host
        # It would send passwords of ~/.netrc, and read certificates and proxies from the environment by rules of its own.
        self.trust_env = False
        self.max_redirects = HOPS
        self.headers.update({"Accept-Encoding": "identity", "User-Agent": "lustrain"})

    def send_to(self, method: str, url: str, **content: Any) -> requests.Response:
        return self.request(method, url, allow_redirects=method == "GET", stream=True, **content)

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Send one request, the first or one that a redirect made."""
        url = str(request.url)
        parts = urlsplit(url)
        if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.netloc)):
            why = f"the registry refers to {parts.scheme}://{parts.netloc}, which does not use TLS"
            fix = "ask its administrator to correct this address"
            raise UserError(problem("registry", self._host, why, fix=fix), FAILED)
        options |= {"timeout": TIMEOUT_S, "verify": _verified_by(parts.netloc), "proxies": get_environ_proxies(url)}
        return super().send(request, **options)


def _verified_by(host: str) -> str | bool:
    """Return the CA with which the engine trusts this host, else the user's, else True for the system's."""
    ours = sorted((_CERTIFICATES / host).glob("*.crt"))
    file = str(ours[0]) if ours else os.environ.get("SSL_CERT_FILE", "")
    if file and not Path(file).is_file():
        raise UserError(problem("SSL_CERT_FILE", file, "no such file", fix="name a PEM file, or unset it"))
    return file or True


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that an answer asks for; None without a header that can be read."""
    try:
        return Retry().parse_retry_after(headers.get("Retry-After", ""))
    except InvalidHeader:
        return None


def _root(error: BaseException) -> BaseException:
    """Return the first error of a chain; the later ones quote whole addresses, which may be signed."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return error
