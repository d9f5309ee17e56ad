"""HTTP with one registry: TLS, credentials, redirects and retries.

https://distribution.github.io/distribution/spec/auth/token/ is how tokens are asked for.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urljoin, urlsplit
from urllib.request import parse_http_list, parse_keqv_list

import requests
from requests.utils import get_environ_proxies
from urllib3.exceptions import HTTPError

from images.model import DOCKER_HUB
from images.plan.references import is_loopback
from images.registry.credentials import Credentials
from images.registry.retry import Patience, asked
from lustrain.problem import FAILED, UserError, problem

log = logging.getLogger(__name__)

TIMEOUT_S = (10.0, 60.0)
"""To connect, and between two pieces of an answer."""
HOPS = 5
AGAIN = (429, 500, 502, 503, 504)
LONGEST_ERROR = 64 << 10
NAME_TRIES = 3
"""A name that the resolver says is nobody's; one that it cannot look up now is asked for as long as anything else."""
_NO_NAME = "its host name cannot be found"
_HUB_HOST = "registry-1.docker.io"
_CERTIFICATES = Path("/etc/docker/certs.d")


class Transport:
    """Sends requests to one registry, with retries. A final failure is a UserError in one line, without a secret."""

    def __init__(
        self, host: str, credentials: Credentials | None, ca: Path | None = None, patience: Patience | None = None
    ) -> None:
        self.host = host
        self.credentials = credentials
        self.patience = patience or Patience()
        self._ca = ca
        self._session = requests.Session()
        # It would send passwords of ~/.netrc, and take certificates and proxies from the environment past our own rules.
        self._session.trust_env = False
        self._scheme = "" if is_loopback(host) else "https"
        self._authorizations: dict[str, str] = {}
        self._told = False
        if ca is not None:
            try:
                ssl.create_default_context(cafile=str(ca))
            except OSError:
                why = "no file with certificates"
                raise UserError(
                    problem("--ca", str(ca), why, fix="name a PEM file with the CA's certificate")
                ) from None

    def ask(
        self,
        method: str,
        path: str,
        *,
        scope: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        good: tuple[int, ...] = (200,),
    ) -> requests.Response:
        """Return an answer with one of the `good` statuses, its body not read yet. `scope` tells apart what tokens are
        good for."""
        why, tried = "", 0
        while tried < self.patience.tries:
            tried, pause = tried + 1, None
            try:
                answer = self._authorized(method, path, scope, dict(headers or {}), body)
            except requests.exceptions.SSLError as error:
                if final := self._untrusted(str(error)):
                    raise final from None
                why = reason(error)
            except requests.exceptions.InvalidURL:
                raise UserError(problem("registry", self.host, "not an address")) from None
            except (requests.RequestException, OSError) as error:
                why = reason(error)
            else:
                if answer.status_code in good:
                    return answer
                if answer.status_code not in AGAIN:
                    raise self._refused(method, path, answer)
                why, pause = self._said(answer), asked(answer.headers)
                answer.close()
            if why == _NO_NAME and tried >= NAME_TRIES:
                break
            if tried < self.patience.tries:
                self.wait(tried, pause, why)
        raise self.gone(tried, why)

    def wait(self, tried: int, asked_s: float | None, why: str) -> None:
        """Pause before the next try; the reason is logged once."""
        if not self._told:
            log.warning("%s: %s; trying again", self.host, why)
            self._told = True
        time.sleep(self.patience.pause(tried, asked_s))

    def gone(self, tried: int, why: str) -> UserError:
        fix = "see that it runs and can be reached from here; a push goes on where it ended"
        return UserError(problem("registry", self.host, f"no usable answer in {tried} tries: {why}", fix=fix), FAILED)

    def renew(self) -> bool:
        """Ask for credentials again after a refusal; whether there are any."""
        self._authorizations.clear()
        if self.credentials is None:
            return False
        self.credentials = self.credentials.renewed()
        return True

    def _authorized(
        self, method: str, path: str, scope: str, headers: dict[str, str], body: bytes | None
    ) -> requests.Response:
        """One try; a challenge is answered, and with fresh credentials where those that we had were refused."""
        if self.credentials is not None and self.credentials.stale:
            self.renew()
        url = f"{self._base()}{path}"
        renewed = False
        while True:
            sent = self._authorizations.get(scope)
            answer = self._hop(method, url, {**headers, **({"Authorization": sent} if sent else {})}, body)
            if not self._asks_who(answer):
                return answer
            challenge = answer.headers.get("WWW-Authenticate", "")
            found = None if sent else self._answer_to(challenge)
            if found is None and not renewed:
                # Refused with what we had: credentials that end, or tokens made from them, may be had anew.
                renewed = self.renew() or challenge.lower().startswith("bearer")
                found = self._answer_to(challenge) if renewed and challenge else None
                if sent and found is None and renewed and self.credentials:
                    found = basic(self.credentials)
            if found is None or (found == sent and found.startswith("Basic")):
                return answer
            answer.close()
            self._authorizations[scope] = found

    def _asks_who(self, answer: requests.Response) -> bool:
        """401; an ECR says 403 as well where a token has ended."""
        ends = self.credentials is not None and self.credentials.ends is not None
        return answer.status_code == 401 or (answer.status_code == 403 and ends)

    def _answer_to(self, challenge: str) -> str | None:
        """Return what to put into Authorization; None where we have nothing that it asks for."""
        kind, _, rest = challenge.partition(" ")
        credentials = self.credentials
        if kind.lower() == "bearer":
            return self._token({name: value or "" for name, value in parse_keqv_list(parse_http_list(rest)).items()})
        if kind.lower() != "basic" or credentials is None or credentials.identity_token:
            return None
        return basic(credentials)

    def _token(self, challenge: Mapping[str, str]) -> str | None:
        """From the token service that the registry names; None where it refuses us."""
        realm, credentials = challenge.get("realm", ""), self.credentials
        self._must_be_tls(realm)
        query = {name: challenge[name] for name in ("service", "scope") if challenge.get(name)}
        if credentials is not None and credentials.identity_token:
            form = {**query, "grant_type": "refresh_token", "client_id": "lustrain"}
            form["refresh_token"] = credentials.identity_token
            answer = self._send("POST", realm, {}, data=form)
        else:
            headers = {} if credentials is None else {"Authorization": basic(credentials)}
            answer = self._send("GET", realm, headers, params=query)
        with answer:
            if answer.status_code in AGAIN:
                raise requests.ConnectionError(f"the token service answered {answer.status_code}")
            if answer.status_code != 200:
                return None
            try:
                found = answer.json()
                return f"Bearer {found.get('token') or found['access_token']}"
            except (ValueError, KeyError, AttributeError):
                return None

    def _hop(self, method: str, url: str, headers: dict[str, str], body: bytes | None) -> requests.Response:
        """Follow redirects ourselves: who we are is told to the registry and to nobody else."""
        for _ in range(HOPS):
            answer = self._send(method, url, headers, data=body)
            if not (answer.is_redirect and method in ("GET", "HEAD")):
                return answer
            answer.close()
            there = urljoin(url, answer.headers["Location"])
            self._must_be_tls(there)
            if _origin(there) != _origin(url):
                headers = {name: value for name, value in headers.items() if name != "Authorization"}
            url = there
        raise UserError(problem("registry", self.host, f"more than {HOPS} redirects in a row"), FAILED)

    def _send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        data: bytes | Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> requests.Response:
        return self._session.request(
            method,
            url,
            headers={"Accept-Encoding": "identity", "User-Agent": "lustrain", **headers},
            data=data,
            params=params,
            allow_redirects=False,
            stream=True,
            timeout=TIMEOUT_S,
            verify=self._verified_by(urlsplit(url).netloc),
            proxies={str(name): str(value) for name, value in get_environ_proxies(url, no_proxy=None).items()},
        )

    def _verified_by(self, host: str) -> str | bool:
        """Return the CA given, else what the engine believes of this registry, else the user's or the system's."""
        ours = sorted((_CERTIFICATES / host).glob("*.crt")) if host == self.host else []
        found = str(self._ca or "") or (str(ours[0]) if ours else os.environ.get("SSL_CERT_FILE", ""))
        if found and not Path(found).is_file():
            raise UserError(problem("SSL_CERT_FILE", found, "no such file", fix="name a PEM file, or unset it"))
        return found or True

    def _base(self) -> str:
        if not self._scheme:
            self._scheme = "https" if _speaks_tls(self.host) else "http"
        return f"{self._scheme}://{_HUB_HOST if self.host == DOCKER_HUB else self.host}"

    def _must_be_tls(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.netloc)):
            why = f"it sends us to {parts.scheme or 'nowhere'}://{parts.netloc}, which does not use TLS"
            raise UserError(problem("registry", self.host, why, fix="have its administrator mend its address"), FAILED)

    def _refused(self, method: str, path: str, answer: requests.Response) -> UserError:
        status, said = answer.status_code, self._said(answer)
        if status == 401 and self.credentials is None:
            why = "it requires credentials, and none for it were found"
            return UserError(problem("registry", self.host, why, fix=f"docker login {self.host}"), FAILED)
        if status == 401:
            why = f"it does not take the credentials of user {self.credentials and self.credentials.username!r}"
            fix = f"docker login {self.host} again, or renew what its credential helper or AWS profile uses"
            return UserError(problem("registry", self.host, why, fix=fix), FAILED)
        if status == 403:
            fix = "ask for the right to pull from and push to this repository"
            return UserError(
                problem("registry", self.host, f"this user may not {method} {path}: {said}", fix=fix), FAILED
            )
        if status == 404:
            fix = "see the spelling of repository and tag, and whether it was pushed"
            return UserError(
                problem("registry", self.host, f"it has no {path.removeprefix('/v2/')}: {said}", fix=fix), FAILED
            )
        return UserError(problem("registry", self.host, f"{method} {path}: {said}"), FAILED)

    def _said(self, answer: requests.Response) -> str:
        """Status and the registry's own words, https://distribution.github.io/distribution/spec/api/#errors"""
        words = ""
        try:
            read = json.loads(answer.raw.read(LONGEST_ERROR, decode_content=True))
            words = "; ".join(f"{one.get('code')} {one.get('message') or ''}".strip() for one in read["errors"])
        except (ValueError, LookupError, TypeError, AttributeError, OSError, HTTPError):
            # The status alone is an answer.
            words = str(answer.reason or "")
        hidden = self.credentials.hide(words) if self.credentials else words
        return f"{answer.status_code} {without_queries(hidden)[:300]}".strip()

    def _untrusted(self, said: str) -> UserError | None:
        """None where the handshake only broke, as it does when a registry ends."""
        if "CERTIFICATE_VERIFY_FAILED" in said:
            why = "its certificate is not signed by a known CA, or is for a different name"
            fix = f"SSL_CERT_FILE=FILE with its CA (and for the engine {_CERTIFICATES / self.host}/ca.crt)"
        elif "WRONG_VERSION_NUMBER" in said or "RECORD_LAYER" in said.upper().replace(" ", "_"):
            why, fix = "it does not speak TLS", "give it TLS; without, only registries on this machine are used"
        else:
            return None
        return UserError(problem("registry", self.host, why, fix=fix), FAILED)


def basic(credentials: Credentials) -> str:
    """RFC 7617, in UTF-8."""
    return "Basic " + b64encode(f"{credentials.username}:{credentials.password}".encode()).decode()


def without_queries(text: str) -> str:
    """Return a text without what follows ? in its addresses: signed ones are as good as a password."""
    return re.sub(r"(https?://[^\s\"'?]+)\?[^\s\"']*", r"\1?…", text)


def reason(error: BaseException) -> str:
    """Return the cause of a network error in a few words, without the query of an address."""
    text = str(error).lower()
    for sign, words in (
        ("refused", "connection refused"),
        ("name or service not known", _NO_NAME),
        ("temporary failure in name", "no answer from the name service"),
        ("name resolution", _NO_NAME),
        ("failed to resolve", _NO_NAME),
        ("timed out", "no answer in time"),
        ("timeout", "no answer in time"),
        ("no route", "no route to it"),
        ("unreachable", "the network cannot reach it"),
        ("reset", "connection reset"),
        ("proxy", "the proxy refuses"),
        ("token service", str(error)),
    ):
        if sign in text:
            return words
    return f"the connection broke ({type(error).__name__})"


def _origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _speaks_tls(host: str) -> bool:
    """Asked of this machine's registries only; whether to trust the certificate is seen later. OSError: nothing answers.

    Without TLS first: servers with TLS say so at once, while some without it wait for the rest of a handshake.
    """
    parts = urlsplit(f"//{host}")
    name, port = parts.hostname or "", parts.port
    connection = HTTPConnection(name, port or 80, timeout=TIMEOUT_S[0])
    try:
        connection.request("GET", "/v2/")
        answer = connection.getresponse()
        return answer.status == 400 and b"HTTPS" in answer.read(LONGEST_ERROR)
    except ConnectionRefusedError:
        if port:
            raise
    except (HTTPException, ConnectionError):
        # Closed without a word: TLS, or a server that is about to end.
        pass
    finally:
        connection.close()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((name, port or 443), TIMEOUT_S[0]) as plain, context.wrap_socket(plain):
        return True
