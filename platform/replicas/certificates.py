"""Certificates that identify servers to one another. A private key never leaves its process."""

from __future__ import annotations

import os
import re
import secrets
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LIFETIME_S = 24 * 3600.0
CLOCK_SKEW_S = 24 * 3600.0
"""A certificate is valid from this many seconds before its creation, because hosts' clocks differ."""
SETTLE_S = 60.0
"""Delay, in seconds, before a renewed certificate is used, so that every server can read it first."""
MAX_CERTIFICATES = 4
"""Maximum number of certificates accepted from one server. Further certificates are ignored."""

Now = Callable[[], datetime]


class CertificateRefused(Exception):
    """Another server's certificate cannot be used. The message says why."""


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedCertificate:
    pem: str
    der: bytes
    expires: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCertificate:
    certificate_pem: bytes
    key_pem: bytes
    made_s: float


class OwnCertificates:
    """This server's certificates. Each gets a successor halfway through its lifetime, and both are accepted."""

    def __init__(self, name: str, now: Now = utc_now, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._now = now
        self._clock = clock
        self._certificates = [self._make()]

    @property
    def pem(self) -> str:
        """All valid certificates, in PEM format, for publication."""
        return "".join(one.certificate_pem.decode() for one in self._certificates)

    @property
    def in_use(self) -> OwnCertificate:
        settled = [one for one in self._certificates if self._clock() - one.made_s >= SETTLE_S]
        return settled[-1] if settled else self._certificates[0]

    def renew_if_due(self) -> bool:
        """If the newest certificate is past half its lifetime, create a successor, drop expired certificates and return
        True.
        """
        now_s = self._clock()
        if now_s - self._certificates[-1].made_s < LIFETIME_S / 2:
            return False
        alive = [one for one in self._certificates if now_s - one.made_s < LIFETIME_S]
        self._certificates = [*alive, self._make()]
        return True

    def _make(self) -> OwnCertificate:
        key = ec.generate_private_key(ec.SECP256R1())
        # OpenSSL looks up accepted certificates by subject, so every certificate needs a unique subject.
        subject = f"{self._name} {secrets.token_hex(8)}"
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
        now = self._now()
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(seconds=CLOCK_SKEW_S))
            .not_valid_after(now + timedelta(seconds=LIFETIME_S))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        return OwnCertificate(
            certificate_pem=certificate.public_bytes(serialization.Encoding.PEM),
            key_pem=key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
            made_s=self._clock(),
        )


def read_certificates(name: str, pem: str) -> tuple[PublishedCertificate, ...]:
    """Return the certificates of the server `name`, expired or not. Raises CertificateRefused if they cannot be used.

    OpenSSL looks up accepted certificates by subject. A certificate with another server's subject, or one that OpenSSL
    cannot load, would prevent the other servers from connecting to one another.
    """
    try:
        found = x509.load_pem_x509_certificates(pem.encode())[:MAX_CERTIFICATES]
        published = tuple(
            PublishedCertificate(
                pem=one.public_bytes(serialization.Encoding.PEM).decode(),
                der=one.public_bytes(serialization.Encoding.DER),
                expires=one.not_valid_after_utc,
            )
            for one in found
        )
        subjects = [one.subject.rfc4514_string() for one in found]
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata="".join(one.pem for one in published))
    except Exception:
        # The parsers raise errors of many types for malformed certificates.
        raise CertificateRefused("its certificate cannot be read") from None
    if not all(re.fullmatch(f"CN={re.escape(name)} [0-9a-f]{{16}}", subject) for subject in subjects):
        raise CertificateRefused("its certificate names another server")
    return published


def tls_context(purpose: int, own: OwnCertificate, accepted: Iterable[PublishedCertificate]) -> ssl.SSLContext:
    """Return a context for mutually authenticated TLS 1.3.

    `purpose` is `ssl.PROTOCOL_TLS_SERVER` or `ssl.PROTOCOL_TLS_CLIENT`. The caller must also check that the peer's
    certificate is one of the accepted certificates, because an accepted certificate could have signed another one.
    """
    context = ssl.SSLContext(purpose)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Servers are identified by their certificates, not by their host names.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if purpose == ssl.PROTOCOL_TLS_SERVER:
        # A resumed session would skip the check of the client's certificate.
        context.num_tickets = 0
    context.load_verify_locations(cadata="".join(one.pem for one in accepted))
    # The ssl module reads keys only from files. This file is anonymous and exists only in memory.
    descriptor = os.memfd_create("loramux-certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, own.certificate_pem + own.key_pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context
