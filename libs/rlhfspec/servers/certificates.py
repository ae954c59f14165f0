"""The run's own certificate authority, and what each role proves itself with.

`create_credentials` fills one folder (mode 0700, files 0600): ca.pem; of each role and of the server `nats`
ROLE.pem and ROLE.key for TLS in both directions; of each role ROLE.seed, its NKEY; and redis.password. The authority's
own key is written nowhere: nobody can add a certificate later.

A certificate says "a process of this run, in this role"; for NATS alone the NKEY says which role, and so which rights.
"""

from __future__ import annotations

import ipaddress
import secrets
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rlhfspec.errors import InvalidRequest
from rlhfspec.servers.keys import new_nkey
from rlhfspec.servers.program import write_secret

if TYPE_CHECKING:
    import grpc

LIFETIME = timedelta(days=30)
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
SERVERS = ("nats",)  # with a certificate, without an NKEY
_CLOCKS_DIFFER_BY = timedelta(minutes=5)


def create_credentials(
    folder: Path, roles: Iterable[str], *, hosts: Sequence[str] = (), lifetime: timedelta = LIFETIME
) -> dict[str, str]:
    """Writes all of them anew; returns the public part of each role's NKEY. `hosts`: besides this machine's names."""
    authority = Authority(lifetime)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    write_secret(folder / "ca.pem", authority.certificate)
    write_secret(folder / "redis.password", secrets.token_urlsafe(32).encode())
    public_keys = {}
    for role in roles:
        seed, public_keys[role] = new_nkey()
        write_secret(folder / f"{role}.seed", seed.encode())
    for name in (*public_keys, *SERVERS):
        certificate, key = authority.issue(name, hosts)
        write_secret(folder / f"{name}.pem", certificate)
        write_secret(folder / f"{name}.key", key)
    return public_keys


class Authority:
    """Signs certificates that are good from now until `lifetime` is over."""

    def __init__(self, lifetime: timedelta = LIFETIME) -> None:
        now = datetime.now(UTC)
        self._valid = (now - _CLOCKS_DIFFER_BY, now + lifetime)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(f"rlhfspec run {secrets.token_hex(4)}")
        usage = x509.BasicConstraints(ca=True, path_length=0)
        certificate = (
            self._builder(self._name, self._key.public_key())
            .add_extension(usage, critical=True)
            .add_extension(_key_usage(authority=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, role: str, hosts: Sequence[str] = ()) -> tuple[bytes, bytes]:
        """A certificate and its key, as PEM, to serve on these hosts and to call others."""
        key = ec.generate_private_key(ec.SECP256R1())
        both_ways = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            self._builder(_named(role), key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(authority=False), critical=True)
            .add_extension(both_ways, critical=False)
            .add_extension(x509.SubjectAlternativeName(list(map(_host, (*LOCAL_HOSTS, *hosts)))), critical=False)
            .add_extension(signer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return certificate.public_bytes(serialization.Encoding.PEM), private

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        begin, end = self._valid
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(min(begin, end - _CLOCKS_DIFFER_BY))
            .not_valid_after(end)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        )


def _named(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, key_cert_sign=authority, crl_sign=authority, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


# ---- using them -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """The files that a server with TLS is given. Every client must show a certificate of the authority."""

    certificate: Path
    key: Path
    authority: Path

    @classmethod
    def of(cls, folder: Path, name: str) -> Self:
        folder = folder.absolute()
        return cls(certificate=folder / f"{name}.pem", key=folder / f"{name}.key", authority=folder / "ca.pem")

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Authority, key, certificate."""
        return self.authority.read_bytes(), self.key.read_bytes(), self.certificate.read_bytes()


def client_tls(folder: Path, role: str) -> ssl.SSLContext:
    """To call a server of the run: only one with a certificate of its authority will do."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, folder, role)


def server_tls(folder: Path, role: str) -> ssl.SSLContext:
    """To serve the run's processes, and nobody else."""
    return _context(ssl.PROTOCOL_TLS_SERVER, folder, role)


def channel_credentials(folder: Path, role: str) -> grpc.ChannelCredentials:
    """`client_tls` for gRPC."""
    import grpc

    authority, key, certificate = ServerTls.of(folder, role).read()
    return grpc.ssl_channel_credentials(authority, key, certificate)


def server_credentials(folder: Path, role: str) -> grpc.ServerCredentials:
    """`server_tls` for gRPC."""
    import grpc

    authority, key, certificate = ServerTls.of(folder, role).read()
    return grpc.ssl_server_credentials([(key, certificate)], root_certificates=authority, require_client_auth=True)


def _context(protocol: int, folder: Path, role: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    files = ServerTls.of(folder, role)
    try:
        context.load_verify_locations(files.authority)
        context.load_cert_chain(files.certificate, files.key)
    except OSError as error:  # ssl.SSLError is one
        raise InvalidRequest("credentials", str(folder), f"no usable certificate of {role} is there: {error}") from None
    return context
