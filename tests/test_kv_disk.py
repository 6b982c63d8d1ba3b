"""The disk tier: what is stored outlives the process, whatever happened to it, and no token shows it."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.step import Move, StepPlan
from quire.engine.engine import Engine
from quire.errors import ConfigError
from quire.kv.disk import HEADER, DiskTier, DiskTierError, open_folder
from quire.kv.host import HostTier, Slots
from quire.kv.mailbox import Mailbox
from tests.test_kv_host import Outcome, hosted, latent, params, prompts, run, tiny

__all__ = ["latent", "tiny"]  # fixtures

BLOCK = 256
RECORD = HEADER.size + BLOCK + 20  # and its check


def name_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Store:
    """A disk tier and its host tier, of which slot n holds block n."""

    def __init__(self, folder: Path, budget: int = 2**20, key: bytes = bytes(32)) -> None:
        self.host = HostTier([Slots(16, BLOCK)], key)
        self.pool = torch.arange(16 * BLOCK, dtype=torch.int64).mul(7).to(torch.uint8).view(16, BLOCK)
        self.host.save([self.pool], [Move(number, number, name_of(number)) for number in range(16)])
        folder.mkdir(exist_ok=True)
        self.disk = DiskTier(folder, key, budget, self.host)

    def write(self, *numbers: int) -> None:
        for number in numbers:
            self.disk.write(number % 16, name_of(number))
        self.wait()

    def wait(self) -> None:
        self.disk._thread.submit(int).result()

    def good(self, *numbers: int) -> list[int]:
        """Those that can be read and are what they were."""
        found = []
        for number in numbers:
            self.host.block(15)[:] = 0
            self.host.checks[15] = b""
            self.disk.mailbox.take()
            self.disk.read(0, [(15, name_of(number))])
            self.wait()
            if [ended.blocks for ended in self.disk.mailbox.take() if ended.kind == "read"] == [1]:
                assert self.host.load([self.pool], [Move(14, 15, name_of(number))]) == []
                found.append(number)
        return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def test_blocks_are_there_after_a_restart(folder: Path) -> None:
    store = Store(folder)
    store.write(1, 2, 3)
    store.disk.close()
    again = Store(folder)
    assert again.good(1, 2, 3, 4) == [1, 2, 3]
    again.write(4)
    again.disk.close()
    assert len(Store(folder).disk.index) == 4


def test_wherever_a_crash_cuts_a_segment_the_whole_records_before_it_are_good(folder: Path) -> None:
    store = Store(folder)
    store.write(1, 2, 3)
    store.disk.close()
    [segment] = folder.glob("*.kv")
    whole = segment.read_bytes()
    assert len(whole) == 3 * RECORD
    for size in range(len(whole) + 1):
        segment.write_bytes(whole[:size])
        found = DiskTier(folder, bytes(32), 2**20, store.host)
        assert len(found.index) == size // RECORD, size
        found.close()


@pytest.mark.parametrize("place", [0, 3, 5, 20, 50, 80, HEADER.size + 1, RECORD - 1])
def test_one_flipped_bit_of_a_record_is_a_miss_or_a_bad_load_and_never_another_block(folder: Path, place: int) -> None:
    store = Store(folder)
    store.write(1, 2)
    store.disk.close()
    [segment] = folder.glob("*.kv")
    data = bytearray(segment.read_bytes())
    data[place] ^= 1
    segment.write_bytes(data)
    again = Store(folder)
    if place < HEADER.size:
        assert again.good(1, 2) == []
    else:
        again.disk.read(0, [(15, name_of(1))])
        again.wait()
        assert again.host.load([again.pool], [Move(14, 15, name_of(1))]) == [15]
        assert again.good(2) == [2]


def test_the_oldest_segment_goes_when_the_budget_is_full(folder: Path) -> None:
    store = Store(folder, budget=8 * 4 * RECORD)
    for number in range(100):
        store.host.save([store.pool], [Move(number % 16, number % 16, name_of(number))])
        store.write(number)
        assert sum(file.stat().st_size for file in folder.glob("*.kv")) <= 8 * 4 * RECORD
    kept = store.good(*range(100))
    assert kept == list(range(100 - len(kept), 100)) and 24 <= len(kept) <= 32
    assert sorted(store.disk.index) == [name_of(number) for number in kept]
    store.disk.close()
    assert Store(folder, budget=2 * 4 * RECORD).good(*range(100)) == kept[-8:]


def test_many_segments_need_no_more_open_files_than_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a terabyte in segments of 64 MiB would be more files than a process may open."""
    monkeypatch.setattr("quire.kv.disk.SEGMENT_BYTES", RECORD)
    opened = Path("/proc/self/fd")
    before = len(list(opened.iterdir()))
    for _ in range(2):
        store = Store(folder)
        store.write(*range(60))
        assert len(list(folder.glob("*.kv"))) == 60 and len(list(opened.iterdir())) < before + 20
        store.disk.close()
        before = len(list(opened.iterdir()))


def test_a_program_with_many_open_files_waits_for_the_disk_as_any_other() -> None:
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(least, min(most, 2000)), most))
    opened: list[int] = []
    try:
        while not opened or opened[-1] < 1024:
            opened.append(os.dup(2))
        mailbox = Mailbox()
        threading.Timer(0.05, mailbox.post, ["news"]).start()
        assert mailbox.take(60.0) == ["news"] and mailbox.take(0.001) == []
        mailbox.close()
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (least, most))


def test_a_segment_that_somebody_removed_costs_its_blocks(folder: Path) -> None:
    store = Store(folder)
    store.write(1, 2)
    for file in folder.glob("*.kv"):
        file.unlink()
    assert store.good(1) == [] and store.disk.failures == 1
    assert name_of(1) not in store.disk.index


def test_a_full_disk_is_counted_and_what_comes_later_is_found_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(folder)
    store.write(1)
    write, full = os.pwritev, [True]

    def torn(descriptor: int, buffers: list[Any], offset: int) -> int:
        if full[0]:
            write(descriptor, [bytes(buffers[0])[:30]], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", torn)
    store.write(2, 3, *range(20, 28))
    assert store.disk.failures == 10 and caplog.text.count("No space left") == 2, "the first, and the tenth"
    assert len(list(folder.glob("*.kv"))) == 2, "no new file for each write that fails"
    full[0] = False
    store.write(4)
    assert store.good(1, 2, 3, 4) == [1, 4]
    store.disk.close()
    assert Store(folder).good(1, 2, 3, 4) == [1, 4]


def test_another_key_finds_nothing(folder: Path) -> None:
    store = Store(folder)
    store.write(1, 2)
    store.disk.close()
    assert not Store(folder, key=bytes(31) + b"1").disk.index


def test_the_key_is_kept_where_only_its_owner_reads_it(folder: Path) -> None:
    _, key, lock = open_folder(str(folder))
    os.close(lock)
    assert (folder / "key").stat().st_mode & 0o777 == 0o600
    _, again, lock = open_folder(str(folder))
    assert again == key and len(key) == 32
    with pytest.raises(DiskTierError, match="in use by another engine"):
        open_folder(str(folder))
    os.close(lock)
    (folder / "key").chmod(0o644)
    with pytest.raises(DiskTierError, match="can be read by others"):
        open_folder(str(folder))
    (folder / "key").chmod(0o600)
    (folder / "key").write_bytes(b"short")
    with pytest.raises(DiskTierError, match="5 bytes, not 32"):
        open_folder(str(folder))


# -- engines ---------------------------------------------------------------------------------------------------


def make(folder: Path, **more: Any) -> Engine:
    options = {"max_model_len": 192, "max_num_seqs": 8, "num_kv_blocks": 60, "host_kv_memory": "16MiB"}
    kv = {"disk_kv_path": str(folder), "disk_kv_memory": "64MiB"}
    own = {"model": "demo", "threads": 1, "check_invariants": True}
    config = EngineConfig(**{**own, **options, **kv, **more})  # type: ignore[arg-type]
    return Engine(config)


@pytest.fixture(scope="module")
def expected() -> list[Outcome]:
    engine = Engine(EngineConfig(model="demo", threads=1, max_model_len=192, prefix_cache="off"))
    outcomes = run(engine, prompts(4)[1:], most=8)
    engine.close()
    return outcomes


@pytest.fixture
def filled(folder: Path) -> Iterator[Path]:
    """A folder that has the head of some prompts."""
    engine = make(folder)
    for first in (0, 10, 20):
        run(engine, prompts(4)[1:], first_id=first, most=2)
    engine.close()
    yield folder


def on_disk(engine: Engine) -> dict[str, int]:
    return engine.stats.kv_tiers["disk"]


def test_a_restart_finds_what_was_used_and_says_the_same(filled: Path, expected: list[Outcome]) -> None:
    engine = make(filled)
    assert any("disk tier" in note for note in engine.notes)
    assert run(engine, prompts(4)[1:], most=8) == expected
    assert on_disk(engine)["loaded"] >= 4 and hosted(engine)["loaded"] >= 4 and not hosted(engine)["bad"]
    assert engine.stats.cached_tokens >= 3 * 64
    engine.close()


def test_one_flipped_bit_in_a_segment_is_one_bad_load_and_no_other_token(filled: Path, expected: list[Outcome]) -> None:
    [segment] = filled.glob("*.kv")
    with segment.open("r+b") as file:
        file.seek(HEADER.size + 1000)
        byte = file.read(1)[0]
        file.seek(HEADER.size + 1000)
        file.write(bytes([byte ^ 4]))
    engine = make(filled)
    assert run(engine, prompts(4)[1:], most=8) == expected
    assert hosted(engine)["bad"] == 1
    assert run(engine, prompts(4)[1:], first_id=10, most=8) == expected
    assert hosted(engine)["bad"] == 1
    engine.close()


@pytest.mark.quick("other1", "other4", "other5")
@pytest.mark.parametrize(
    "other",
    [
        {"kv_cache_dtype": "int8"},
        {"block_size": 32},
        {"cpu_kernels": "torch"},
        {"dtype": "float32"},
        {"speculative_config": {"method": "eagle", "model": "demo-eagle", "num_speculative_tokens": 3}},
        {"model": "deepseek_v3"},
    ],
)
def test_blocks_of_another_engine_never_match(filled: Path, other: dict[str, Any], latent: Path) -> None:
    engine = make(filled, **{name: str(latent) if name == "model" else value for name, value in other.items()})
    run(engine, prompts(4)[1:], most=2)
    assert on_disk(engine)["loaded"] == 0 == hosted(engine)["bad"]
    engine.close()


def _not_a_folder(folder: Path) -> None:
    folder.write_text("a file")


def _open_key(folder: Path) -> None:
    os.close(open_folder(str(folder))[2])
    (folder / "key").chmod(0o666)


def _anothers(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, 12345, -1)


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_not_a_folder, "is not a folder"),
        (_open_key, "read by others"),
        pytest.param(_anothers, "belongs to user 12345", marks=AS_ROOT),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_line_and_serving_goes_on(
    folder: Path, spoil: Callable[[Path], None], says: str, expected: list[Outcome]
) -> None:
    spoil(folder)
    engine = make(folder)
    [note] = [note for note in engine.notes if "disk_kv_path" in note]
    assert says in note and "there is no disk tier" in note
    assert run(engine, prompts(4)[1:], most=8) == expected
    engine.close()


def test_a_disk_that_fails_costs_hits_and_nothing_else(filled: Path, expected: list[Outcome]) -> None:
    engine = make(filled)
    disk = engine.tiers.disk
    assert disk is not None

    def fails(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    disk._fill = disk._append = fails  # type: ignore[method-assign]
    assert run(engine, prompts(4)[1:], most=8) == expected
    assert disk.failures and on_disk(engine)["loaded"] == 0
    engine.close()


@pytest.mark.parametrize(("budget", "told"), [("64MiB", False), ("1024TiB", True)])
def test_a_budget_beyond_the_disk_is_told_at_the_start(folder: Path, budget: str, told: bool) -> None:
    engine = make(folder, disk_kv_memory=budget)
    [note] = [note for note in engine.notes if note.startswith("disk tier: ")]
    assert ("lower disk_kv_memory" in note) == told
    engine.close()


def test_a_folder_that_is_read_only_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Any, flags: int, *mode: Any, **more: Any) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(DiskTierError, match="cannot be used: Read-only file system"):
        open_folder(str(folder))


def test_books_that_are_made_anew_while_the_disk_reads_lose_no_slot(filled: Path, expected: list[Outcome]) -> None:
    engine = make(filled)
    schedule, reads = engine.scheduler.schedule, []

    def interrupted(now: float) -> StepPlan | None:
        plan = schedule(now)
        if engine.scheduler.kv.external.sources.reads and not reads:
            reads.append(len(engine.scheduler.kv.external.sources.reads))
            raise MemoryError
        return plan

    engine.scheduler.schedule = interrupted  # type: ignore[method-assign]
    engine.add(Request(90, prompts(4)[1], params(0), max_tokens=8))
    with pytest.raises(MemoryError):
        while True:
            engine.step()
    outcomes: list[Outcome] = [[]]
    while not engine.idle:
        for update in engine.step():
            outcomes[0] += [
                (token, tuple(entry.values)) for token, entry in zip(update.tokens, update.logprobs or [], strict=True)
            ]
    assert outcomes == expected[:1]
    assert run(engine, prompts(4)[1:], first_id=100, most=8) == expected
    engine.close()


CHILD = """
import sys
from tests.test_kv_disk import make, run, prompts
from pathlib import Path
engine = make(Path(sys.argv[1]))
for first in range(0, 1000, 10):
    run(engine, prompts(4)[1:], first_id=first, most=2)
    print("served", flush=True)
"""


@pytest.mark.slow
def test_what_was_stored_before_kill_9_is_found_after_it(folder: Path, expected: list[Outcome]) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(folder)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    for _ in range(4):
        assert child.stdout.readline() == b"served\n"
    child.kill()
    child.wait()
    child.stdout.close()
    engine = make(folder)
    assert run(engine, prompts(4)[1:], most=8) == expected
    assert on_disk(engine)["loaded"] >= 4
    engine.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disk_kv_path": "x"}, "needs host_kv_memory"),
        ({"disk_kv_memory": "1GiB"}, "set disk_kv_path too"),
        ({"host_kv_memory": "1GiB", "disk_kv_path": "x", "disk_kv_memory": "lots"}, "not a size"),
    ],
)
def test_options_that_make_no_sense_together_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="demo", **options)  # type: ignore[arg-type]


def test_ending_a_request_that_waits_for_the_disk_touches_nothing(filled: Path, expected: list[Outcome]) -> None:
    engine = make(filled)
    engine.add(Request(50, prompts(4)[1], params(0), max_tokens=8))
    engine.scheduler.schedule(0.0)
    assert engine.scheduler.kv.external.sources.reads
    engine.abort(50)
    assert run(engine, prompts(4)[1:], most=8) == expected
    engine.close()
