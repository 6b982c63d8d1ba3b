"""TLS: a server's certificate, and the certificates that connections to other servers trust."""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path

from quire.errors import ConfigError
from quire.log import event

logger = logging.getLogger(__name__)

CACERT = "CA certificates (PEM) to trust when connecting to https servers; default: the system's"
"""Help text of the option `cacert`, which several commands have."""


class ServerCertificate:
    """A server's certificate and key, reloaded when their files change, as they do with ACME.

    Args:
        certfile: the certificate and its intermediate certificates, in PEM.
        keyfile: its private key; None: in `certfile`.

    Attributes:
        context: for connections; TLS 1.2 or later.

    Raises:
        ConfigError: a file cannot be read, is not PEM, or certificate and key do not belong together.
    """

    def __init__(self, certfile: str, keyfile: str | None = None) -> None:
        self._files = (certfile, keyfile)
        self._seen = self._stamps()
        self.context = _loaded(certfile, keyfile)

    def refresh(self) -> None:
        """If the files have changed, reload them for new connections; if they are not valid, keep the old ones."""
        stamps = self._stamps()
        if stamps == self._seen:
            return
        self._seen = stamps
        certfile, keyfile = self._files
        try:
            _loaded(certfile, keyfile)  # a first try, since invalid files would corrupt the context in use
            self.context.load_cert_chain(certfile, keyfile, "")
        except (ConfigError, OSError) as error:
            text = f"the certificate has changed, but cannot be used; the old one stays in use: {error}"
            event(logger, "certificate_refused", text, level=logging.ERROR)
        else:
            event(logger, "certificate_renewed", f"the certificate in {certfile} was reloaded")

    def _stamps(self) -> list[tuple[int, int] | None]:
        return [_stamp(path) for path in self._files if path is not None]


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


def _loaded(certfile: str, keyfile: str | None) -> ssl.SSLContext:
    certificates = _read(certfile, "ssl_certfile")
    key = certificates if keyfile is None else _read(keyfile, "ssl_keyfile")
    if "CERTIFICATE-----" not in certificates:
        raise ConfigError(f"ssl_certfile={certfile} has no certificate; it must be PEM (-----BEGIN CERTIFICATE-----)")
    if "PRIVATE KEY-----" not in key:
        where = f"ssl_keyfile={keyfile}" if keyfile is not None else f"ssl_certfile={certfile}, without an ssl_keyfile,"
        raise ConfigError(f"{where} has no private key; it must be PEM (-----BEGIN PRIVATE KEY-----)")
    if "ENCRYPTED" in key:  # in PKCS #8 and in the older format; OpenSSL would ask for a password on the terminal
        raise ConfigError(
            f"the private key in {keyfile or certfile} is encrypted, and a server cannot ask for its password; "
            "decrypt it into a file that only this user can read: openssl pkey -in KEY -out NEW"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certfile, keyfile, "")
    except (OSError, ValueError) as error:  # SSLError is an OSError
        reason = getattr(error, "reason", None)
        if reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"the private key in {keyfile or certfile} does not belong to the first certificate in {certfile}, "
                "which must be the server's own"
            ) from error
        raise ConfigError(f"ssl_certfile={certfile} with its key cannot be used: {reason or error}") from error
    return context


def _read(path: str, name: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}={path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def client_context(cacert: str | None = None) -> ssl.SSLContext:
    """A context for https connections to servers, which verifies their certificates.

    Args:
        cacert: a PEM file with the certificates of trusted authorities; None: the system's.

    Raises:
        ConfigError: the file cannot be read, or has no certificates.
    """
    if cacert is not None:
        _read(cacert, "cacert")
    try:
        return ssl.create_default_context(cafile=cacert)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cacert={cacert} is not a file of certificates (PEM)") from error


def unverified_context() -> ssl.SSLContext:
    """A context for health checks of servers on this machine, whose certificates are not for its address."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def why_untrusted(error: BaseException) -> str | None:
    """What is wrong with a server's certificate, if that caused this error of a connection; otherwise None."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, ssl.SSLCertVerificationError):
            advice = "give the certificate of its authority with --cacert FILE"
            return f"its certificate is not trusted: {found.verify_message}; {advice}"
        found = found.__cause__ or found.__context__
    return None
