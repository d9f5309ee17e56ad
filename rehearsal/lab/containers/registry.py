"""A registry of the lab's own: Debian's docker-registry on a free port, with users and TLS on request."""

from __future__ import annotations

import ipaddress
import re
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType

import bcrypt
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lustrain.ports import hold_port

START_SECONDS = 30.0
# The fewest that bcrypt takes: no one attacks it here.
_ROUNDS = 4
_ACCESS = re.compile(r'"(?P<method>[A-Z]+) (?P<path>/v2/\S*) HTTP/[0-9.]+" (?P<status>\d+) (?P<size>\d+)')


class Registry:
    """This is docker-registry over `folder`; plain http without users by default. It dies with the thread that started it."""

    def __init__(
        self,
        folder: Path,
        users: Mapping[str, str] | None = None,
        tls: bool = False,
        address: str = "127.0.0.1",
        port: int | None = None,
    ) -> None:
        self.folder = folder
        self.users = dict(users or {})
        self.tls = tls
        self.address = address
        # Also while it is stopped, so that it can start again.
        self._held = hold_port(address, port or 0)
        self.port = int(self._held.getsockname()[1])
        self.ca = folder / "ca.crt"
        self._log = folder / "registry.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        """Return address:port, as references name it."""
        return f"{self.address}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}"

    def set_users(self, users: Mapping[str, str]) -> None:
        """Set who may log in from now on, by name and password; read again while it runs. It must have had users before."""
        self.users = dict(users)
        lines = (
            f"{name}:{bcrypt.hashpw(password.encode(), bcrypt.gensalt(_ROUNDS)).decode()}\n"
            for name, password in self.users.items()
        )
        (self.folder / "htpasswd").write_text("".join(lines))

    def requests(self) -> list[tuple[str, str, int]]:
        """Return method, path and status of every request that it answered, in order."""
        return [(method, path, status) for method, path, status, _ in self.answers()]

    def answers(self) -> list[tuple[str, str, int, int]]:
        """Return the same with the bytes of each answer."""
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        matches = _ACCESS.finditer(text)
        return [(item["method"], item["path"], int(item["status"]), int(item["size"])) for item in matches]

    def start(self) -> Registry:
        """Wait until it answers; also again after `stop` or `kill`, with what it held. RuntimeError with its log."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "registry.yml").write_text(yaml.safe_dump(self._settings()))
        # Registries of a killed process would hold its port.
        command = ["setpriv", "--pdeathsig", "KILL", "docker-registry", "serve", str(self.folder / "registry.yml")]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            self._wait()
        except BaseException:
            self.kill()
            raise
        return self

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it in the middle of whatever it does."""
        self._end(signal.SIGKILL)

    def __enter__(self) -> Registry:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def _end(self, number: int) -> None:
        if self._process is None:
            return
        self._process.send_signal(number)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _settings(self) -> dict[str, object]:
        http: dict[str, object] = {"addr": self.host, "secret": "ours alone"}
        settings: dict[str, object] = {
            "version": 0.1,
            "log": {"level": "warn"},
            "storage": {"filesystem": {"rootdirectory": str(self.folder / "blobs")}, "delete": {"enabled": True}},
            "http": http,
        }
        if self.tls:
            if not self.ca.exists():
                _certify(self.folder, self.address)
            http["tls"] = {"certificate": str(self.folder / "server.crt"), "key": str(self.folder / "server.key")}
        if self.users:
            self.set_users(self.users)
            settings["auth"] = {"htpasswd": {"realm": "ours", "path": str(self.folder / "htpasswd")}}
        return settings

    def _wait(self) -> None:
        context = ssl.create_default_context(cafile=str(self.ca)) if self.tls else None
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self._process is not None and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/v2/", timeout=5, context=context):
                    return
            except urllib.error.HTTPError as answer:
                if answer.code == 401:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        raise RuntimeError(f"the registry did not start: {self._log.read_text(errors='replace')[-2000:]}")


def _certify(folder: Path, address: str) -> None:
    """Make a CA that is valid for a day, and its certificate for one address."""
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    name, subject = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in ("Lab CA", address))
    now = datetime.now(UTC)

    def issued(of: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .issuer_name(name)
            .subject_name(of)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
        )

    whole = x509.BasicConstraints(ca=True, path_length=0)
    ca = issued(name, authority).add_extension(whole, critical=True).sign(authority, hashes.SHA256())
    where = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    certificate = issued(subject, server).add_extension(where, critical=False).sign(authority, hashes.SHA256())
    pem = serialization.Encoding.PEM
    (folder / "server.crt").write_bytes(certificate.public_bytes(pem))
    key = server.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "server.key").write_bytes(key)
    # Last, because what it stands for is that the others are there.
    (folder / "ca.crt").write_bytes(ca.public_bytes(pem))
