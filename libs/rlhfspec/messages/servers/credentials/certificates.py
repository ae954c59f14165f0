"""Certificate authority of a run, and the credentials of its roles.

`create_credentials` fills a folder (mode 0700, files 0600) with ca.pem; ROLE.pem and ROLE.key of each role and of
`nats` for mutual TLS; the NKEYs ROLE.seed; and redis.password. The authority's key is never stored, so no certificate
can be added later. NATS accepts only the NKEY as proof of a role.
"""

from __future__ import annotations

import ipaddress
import secrets
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rlhfspec.errors import InvalidRequest
from rlhfspec.messages.servers.credentials.derived import derived, ec_key, new_nkey
from rlhfspec.messages.servers.program import write_secret

if TYPE_CHECKING:
    import grpc

LIFETIME = timedelta(days=30)
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
SERVERS = ("nats",)  # with a certificate, without an NKEY
SERVERS_AUTHORITY = "servers-ca.pem"  # authority of servers that the run does not own
_CLOCKS_DIFFER_BY = timedelta(minutes=5)


def create_credentials(
    folder: Path, roles: Iterable[str], *, hosts: Sequence[str] = (), lifetime: timedelta = LIFETIME
) -> dict[str, str]:
    """Create all credentials anew and return the public NKEY of each role."""
    authority = Authority.derived(
        secrets.token_bytes(32), f"rlhfspec run {secrets.token_hex(4)}", datetime.now(UTC), lifetime
    )
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


@dataclass(frozen=True)
class Authority:
    """Certificate authority with keys derived from `secret`; equal names and times give byte-equal certificates."""

    secret: bytes
    key: ec.EllipticCurvePrivateKey
    certificate: bytes
    valid: tuple[datetime, datetime]

    @classmethod
    def derived(cls, secret: bytes, name: str, begin: datetime, lifetime: timedelta) -> Self:
        key, valid = ec_key(secret, "authority"), _valid(begin, lifetime)
        usage = x509.BasicConstraints(ca=True, path_length=0)
        builder = (
            _builder(_named(name), key.public_key(), _named(name), valid, derived(secret, "serial", "authority", name))
            .add_extension(usage, critical=True)
            .add_extension(_key_usage(authority=True), critical=True)
        )
        return cls(secret, key, _signed(builder, key), valid)

    @classmethod
    def of_pem(cls, secret: bytes, certificate: bytes, key: bytes, begin: datetime, lifetime: timedelta) -> Self:
        try:
            own_key = serialization.load_pem_private_key(key, password=None)
            x509.load_pem_x509_certificate(certificate)
        except ValueError as error:
            raise InvalidRequest("ca.pem, ca.key", "...", f"no usable authority: {error}") from None
        if not isinstance(own_key, ec.EllipticCurvePrivateKey):
            raise InvalidRequest("ca.key", type(own_key).__name__, "must be an elliptic-curve key")
        return cls(secret, own_key, certificate, _valid(begin, lifetime))

    @property
    def private_key(self) -> bytes:
        return _private(self.key)

    def issue(self, role: str, hosts: Sequence[str] = ()) -> tuple[bytes, bytes]:
        """Return a role's new certificate, also valid for `hosts`, and its key, as PEM."""
        key = ec_key(self.secret, "role", role)
        issuer = x509.load_pem_x509_certificate(self.certificate).subject
        serial = derived(self.secret, "serial", "role", role, self.valid[0].isoformat(), *hosts)
        both_ways = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = (
            _builder(_named(role), key.public_key(), issuer, self.valid, serial)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(authority=False), critical=True)
            .add_extension(both_ways, critical=False)
            .add_extension(x509.SubjectAlternativeName(list(map(_host, (*LOCAL_HOSTS, *hosts)))), critical=False)
            .add_extension(signer, critical=False)
        )
        return _signed(builder, self.key), _private(key)


def _valid(begin: datetime, lifetime: timedelta) -> tuple[datetime, datetime]:
    end = begin + lifetime
    return min(begin, end) - _CLOCKS_DIFFER_BY, end


def _builder(
    name: x509.Name, key: ec.EllipticCurvePublicKey, issuer: x509.Name, valid: tuple[datetime, datetime], serial: bytes
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(int.from_bytes(serial[:16], "big"))
        .not_valid_before(valid[0])
        .not_valid_after(valid[1])
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _signed(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> bytes:
    """Sign a certificate deterministically (RFC 6979)."""
    certificate = builder.sign(key, hashes.SHA256(), ecdsa_deterministic=True)
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """Certificate, key and authority files of a TLS server that requires client certificates."""

    certificate: Path
    key: Path
    authority: Path

    @classmethod
    def of(cls, folder: Path, name: str) -> Self:
        folder = folder.absolute()
        return cls(certificate=folder / f"{name}.pem", key=folder / f"{name}.key", authority=folder / "ca.pem")

    def read(self) -> tuple[bytes, bytes, bytes]:
        return self.authority.read_bytes(), self.key.read_bytes(), self.certificate.read_bytes()


def client_tls(folder: Path, role: str, host: str | None = None) -> ssl.SSLContext:
    """Return a client context that verifies server certificates for `host`, by default the address it connects to."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, folder, role)
    assert isinstance(context, _ForOneHost)
    context.host = host
    return context


def servers_tls(folder: Path, role: str) -> ssl.SSLContext:
    """Return a TLS client context for NATS and Redis; servers shared by jobs (servers-ca.pem) need no certificate."""
    authority = folder / SERVERS_AUTHORITY
    if not authority.exists():
        return client_tls(folder, role)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(authority)
    except OSError as error:
        raise InvalidRequest("credentials", str(authority), f"holds no usable certificate: {error}") from None
    return context


def server_tls(folder: Path, role: str) -> ssl.SSLContext:
    """Return a TLS server context that admits only processes of the run."""
    return _context(ssl.PROTOCOL_TLS_SERVER, folder, role)


def channel_credentials(folder: Path, role: str) -> grpc.ChannelCredentials:
    import grpc

    authority, key, certificate = ServerTls.of(folder, role).read()
    return grpc.ssl_channel_credentials(authority, key, certificate)


def server_credentials(folder: Path, role: str) -> grpc.ServerCredentials:
    import grpc

    authority, key, certificate = ServerTls.of(folder, role).read()
    return grpc.ssl_server_credentials([(key, certificate)], root_certificates=authority, require_client_auth=True)


class _ForOneHost(ssl.SSLContext):
    """TLS context that verifies certificates for the name `host`, whatever address it connects to."""

    host: str | None = None

    def wrap_socket(  # type: ignore[override]
        self, sock: Any, *, server_hostname: Any = None, **options: Any
    ) -> ssl.SSLSocket:
        return super().wrap_socket(sock, server_hostname=self._name(server_hostname), **options)

    def wrap_bio(self, incoming: Any, outgoing: Any, *, server_hostname: Any = None, **options: Any) -> ssl.SSLObject:  # type: ignore[override]
        return super().wrap_bio(incoming, outgoing, server_hostname=self._name(server_hostname), **options)

    def _name(self, called: Any) -> Any:
        return called if called is None or self.host is None else self.host


def _context(protocol: int, folder: Path, role: str) -> ssl.SSLContext:
    context = _ForOneHost(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    files = ServerTls.of(folder, role)
    try:
        context.load_verify_locations(files.authority)
        context.load_cert_chain(files.certificate, files.key)
    except OSError as error:  # ssl.SSLError is one
        raise InvalidRequest("credentials", str(folder), f"holds no usable certificate of {role}: {error}") from None
    return context
