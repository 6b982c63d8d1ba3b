"""Certificates for tests, made by the `openssl` of the machine."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from quire.tls import ServerCertificate

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl command here")


@dataclass(frozen=True)
class Files:
    """A certificate for localhost and 127.0.0.1 that vouches for itself, and its key."""

    cert: Path
    key: Path

    @property
    def loaded(self) -> ServerCertificate:
        return ServerCertificate(str(self.cert), str(self.key))


def make_certificate(folder: Path, name: str = "server") -> Files:
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "3650"]
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", *curve, *names, "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return Files(cert, key)
