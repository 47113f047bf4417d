from __future__ import annotations

import socket
import socketserver
import ssl
import threading
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

PAUSE_S = 0.05
MAX_DRIPS = 200


class DrippingServer:
    """Sends `at_once`, then one byte every `PAUSE_S`, until the client disconnects or `stop` is called.

    With `directory`, the server speaks HTTPS and stores the certificate's path in `certificate`.
    """

    def __init__(self, at_once: bytes, directory: Path | None = None) -> None:
        self.at_once = at_once
        self.is_stopped = threading.Event()
        self.tls: ssl.SSLContext | None = None
        if directory is not None:
            self.certificate = directory / "certificate.pem"
            self.tls = _tls(self.certificate, directory / "key.pem")
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.dripping = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http{'s' if self.tls else ''}://127.0.0.1:{self._server.server_address[1]}"

    def stop(self) -> None:
        self.is_stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    dripping: DrippingServer


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        dripping = self.server.dripping
        with suppress(OSError):
            connection: socket.socket = self.request
            if dripping.tls is not None:
                connection = dripping.tls.wrap_socket(connection, server_side=True)
            with connection:
                connection.recv(1 << 16)
                connection.sendall(dripping.at_once)
                for _ in range(MAX_DRIPS):
                    if dripping.is_stopped.wait(PAUSE_S):
                        break
                    connection.sendall(b"x")


def _tls(certificate: Path, key: Path) -> ssl.SSLContext:
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "loopback")])
    now = datetime.now(UTC)
    made: Any = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(private, hashes.SHA256())
    )
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
