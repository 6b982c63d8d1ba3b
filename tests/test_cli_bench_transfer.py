"""The command `quire bench transfer`: its table, its JSON, and mistakes in its options."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from quire.bench import transfer
from quire.bench.transfer import devices
from quire.cli.main import main


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "REGION", 1 << 20)
    monkeypatch.setattr(transfer, "BLOCKS", (4096, 131072))


@pytest.mark.usefixtures("small")
def test_the_command_prints_a_table_that_lines_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", "--transport", "shared_memory,socket"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heading = next(line for line in lines if line.startswith("transport"))
    rows = [line for line in lines if line.startswith(("shared_memory ", "socket "))]
    assert [row[:23].split() for row in rows] == [
        [name, size, "KiB"] for name in ("shared_memory", "socket") for size in ("4", "128")
    ]
    ends = [heading.index(word) + len(word) for word in ("one, us", "coalesced, GB/s", "scattered, GB/s")]
    for row in rows:
        assert [match.end() for match in re.finditer(r"[\d.,]+(?= |$)", row[24:])] == [end - 24 for end in ends]
        assert all(float(figure.replace(",", "")) > 0 for figure in row.split()[3:])


@pytest.mark.usefixtures("small")
def test_json_lines_go_to_standard_output_and_the_table_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", "--transport", "shared_memory", "--json"]) == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["transport"], row["block"]) for row in rows] == [("shared_memory", 4096), ("shared_memory", 131072)]
    assert all(row["one_us"] > 0 and row["coalesced_gb_s"] > 0 and row["scattered_gb_s"] > 0 for row in rows)
    assert "coalesced, GB/s" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--transport", "rdma"],
            "--transport 'rdma': unknown transport; known: shared_memory, socket, mooncake, nixl",
        ),
        (["--transport", ""], "--transport '': unknown transport"),
        (["--transports", "socket"], "unknown option --transports; did you mean --transport?"),
        (["--host", "no such host"], "--host 'no such host': "),
        (["--json", "/no/such/folder/file"], "--json /no/such/folder/file cannot be written"),
        (["socket"], "unrecognized arguments: socket"),
    ],
)
def test_wrong_flags_are_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.usefixtures("small")
def test_a_transport_that_fails_is_said_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quire.kv.transport.installed", lambda: ["socket", "shared_memory"])
    assert main(["bench", "transfer", "--host", "192.0.2.77"]) == 0
    out = capsys.readouterr().out
    assert "socket: KV blocks cannot be offered at 192.0.2.77:0: Cannot assign requested address" in out
    assert "shared_memory   128 KiB" in out
    assert main(["bench", "transfer", "--host", "192.0.2.77", "--transport", "socket"]) == 1


def test_rdma_devices_are_named(tmp_path: Path) -> None:
    assert devices(tmp_path) == [("RDMA devices", "none"), ("peer memory module", "none")]
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs/types").mkdir(parents=True)
    for name, text in (
        ("state", "4: ACTIVE\n"),
        ("rate", "400 Gb/sec (4X NDR)\n"),
        ("link_layer", "Ethernet\n"),
        ("gids/0", "0000:0000:0000:0000:0000:0000:0000:0000\n"),
        ("gids/3", "0000:0000:0000:0000:0000:ffff:0a00:0001\n"),
        ("gid_attrs/types/3", "RoCE v2\n"),
    ):
        (port / name).write_text(text)
    (tmp_path / "module/nvidia_peermem").mkdir(parents=True)
    assert devices(tmp_path) == [
        ("RDMA device mlx5_0, port 1", "4: ACTIVE, 400 Gb/sec (4X NDR), Ethernet"),
        ("  GID 3", "0000:0000:0000:0000:0000:ffff:0a00:0001 RoCE v2"),
        ("peer memory module", "nvidia_peermem"),
    ]
