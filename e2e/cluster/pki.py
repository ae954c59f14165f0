"""Keys and certificates of a cluster, and kubeconfigs that carry them."""

from __future__ import annotations

import base64
import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFE = timedelta(days=365)  # Kueue makes new ones of those that end within 90 days


class Authority:
    """A certificate authority of its own, its files in `folder`/NAME.crt and .key."""

    def __init__(
        self, folder: Path, name: str, *, hosts: tuple[str, ...] = (), key: rsa.RSAPrivateKey | None = None
    ) -> None:
        self.folder, self.name = folder, name
        self.key = key or ec.generate_private_key(ec.SECP256R1())
        self.subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(self.subject, self.subject, self.key.public_key(), hosts)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.pem = builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        self.certificate_file = folder / f"{name}.crt"
        self.certificate_file.write_bytes(self.pem)
        _write_key(folder / f"{name}.key", self.key)

    def issue(self, name: str, common_name: str, *, group: str = "", hosts: tuple[str, ...] = ()) -> tuple[Path, Path]:
        """Certificate and key, for client and server alike: (NAME.crt, NAME.key)."""
        key = ec.generate_private_key(ec.SECP256R1())
        parts = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
        parts += [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)] if group else []
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = _builder(x509.Name(parts), self.subject, key.public_key(), hosts).add_extension(
            x509.ExtendedKeyUsage(usages), critical=False
        )
        certificate = self.folder / f"{name}.crt"
        certificate.write_bytes(builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        _write_key(self.folder / f"{name}.key", key)
        return certificate, self.folder / f"{name}.key"


def write_service_account_keys(folder: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    _write_key(folder / "sa.key", key)
    public = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    (folder / "sa.pub").write_bytes(key.public_key().public_bytes(*public))


def write_kubeconfig(path: Path, server: str, authority: Authority, files: tuple[Path, Path]) -> Path:
    certificate, key = (base64.b64encode(each.read_bytes()).decode() for each in files)
    ca = base64.b64encode(authority.pem).decode()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "e2e",
        "clusters": [{"name": "e2e", "cluster": {"server": server, "certificate-authority-data": ca}}],
        "users": [{"name": "e2e", "user": {"client-certificate-data": certificate, "client-key-data": key}}],
        "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "e2e", "namespace": "default"}}],
    }
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(config))
    return path


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey, hosts: tuple[str, ...]
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(minutes=5)).not_valid_after(now + LIFE)
    if not hosts:
        return builder
    return builder.add_extension(x509.SubjectAlternativeName([_general(each) for each in hosts]), critical=False)


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> None:
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(*form))
