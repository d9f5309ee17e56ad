"""Certificates for registries of tests that are not one address, as the lab's own are."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def certify(folder: Path, *names: str) -> Path:
    """ca.crt, server.crt and server.key in `folder`, as the lab's Registry calls them; returns the CA's."""
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer, subject = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, one)]) for one in ("Test CA", "server"))
    begin = datetime.now(UTC) - timedelta(hours=1)

    def issued(of: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType) -> bytes:
        builder = x509.CertificateBuilder(issuer, of, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(begin).not_valid_after(begin + timedelta(days=1))
        signed = builder.add_extension(extension, critical=False).sign(authority, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ca.crt").write_bytes(issued(issuer, authority, x509.BasicConstraints(ca=True, path_length=0)))
    alternatives = x509.SubjectAlternativeName([_name(one) for one in names])
    (folder / "server.crt").write_bytes(issued(subject, server, alternatives))
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "server.key").write_bytes(server.private_bytes(pem, pkcs8, serialization.NoEncryption()))
    return folder / "ca.crt"


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
