"""The process of `bench/transfer.py` that offers a region to read from."""

from __future__ import annotations

import socket

import msgspec

from quire.bench.transfer import Held, Said, filled, make_region
from quire.child import begin
from quire.errors import QuireError
from quire.kv.transport import open_transport


def main() -> None:
    held = begin(Held)
    with socket.socket(fileno=held.fd) as link:
        region = make_region(held.size)
        region.memory[:] = filled(held.size, held.seed)
        try:
            transport = open_transport(held.transport, region, held.token.encode(), held.host)
            said = Said(transport.address)
        except QuireError as error:
            said = Said(error=str(error))
        link.sendall(msgspec.json.encode(said) + b"\n")
        link.recv(1)


if __name__ == "__main__":
    main()
