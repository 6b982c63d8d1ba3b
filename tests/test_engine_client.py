"""An HTTP process's client of several replicas: where requests go, and what becomes of them when engines die."""

from __future__ import annotations

import asyncio
import errno
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from quire.core.request import Request, RequestUpdate
from quire.core.sampling_params import SamplingParams
from quire.engine.outputs import RequestOutput
from quire.errors import EngineClosedError
from quire.ipc import client as client_module
from quire.ipc import link as link_module
from quire.ipc import wire
from quire.ipc.board import NUM_OPEN, PATIENCE, PULSE, Board
from quire.ipc.client import EngineClient
from quire.ipc.link import EngineLink
from quire.ipc.placement import Placement
from tests.server_fakes import engine_info

KEY = bytes(32)
LONG = SamplingParams(max_tokens=100, seed=0, ignore_eos=True)


class FakeChannel:
    """In the place of a socket: what was sent."""

    def __init__(self, context: Any, address: str, identity: str, receive: Any) -> None:
        self.address, self.said, self.is_closed = address, list[Any](), False

    def send(self, message: bytes) -> None:
        self.said.append(wire.decode_to_engine(message))

    def close(self) -> None:
        self.is_closed = True


class Fleet:
    """A client of engines that are not there: what they would say is put in its mouth."""

    def __init__(self, directory: Path, replicas: int) -> None:
        self.client = EngineClient(directory, 0, replicas)
        self.client._tokenizer = cast(Any, asyncio.get_running_loop().create_future())
        self.client._tokenizer.set_result(None)  # type: ignore[attr-defined]
        self.directory, self.boots = directory, [0] * replicas
        self.outputs: dict[str, RequestOutput] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def links(self) -> list[EngineLink]:
        return self.client.links

    async def tell(self, replica: int, state: Any, **more: Any) -> None:
        message = wire.EngineState(replica=replica, boot=self.boots[replica], state=state, **more)
        await self.client._take_state(self.links[replica], message)
        await asyncio.sleep(0)

    async def boot(self, replica: int, state: Any = "loading", **more: Any) -> None:
        self.boots[replica] += 1
        Board.create(wire.board_path(self.directory, replica, self.boots[replica]))
        await self.tell(replica, state, **more)

    async def ready(self, replica: int) -> None:
        if not self.boots[replica]:
            await self.boot(replica)
        await self.tell(replica, "ready", info=engine_info(boot=self.boots[replica]))

    async def die(self, replica: int, suspects: Any = (), **more: Any) -> None:
        await self.boot(replica, "restarting", cause="killed", suspects=list(suspects), **more)

    async def submit(self, name: str, prompt: list[int] | None = None) -> int:
        """A request's number, when it was placed."""
        ids = prompt or [random.Random(name).randrange(300) for _ in range(8)]
        prepared = self.client.prepare(None, ids, LONG)

        async def follow() -> None:
            async for output in self.client.generate(prepared, name=name, arrived=time.monotonic()):
                self.outputs[name] = output

        before = set(self.client._origins)
        self.tasks[name] = asyncio.create_task(follow())
        await asyncio.sleep(0)
        [number] = set(self.client._origins) - before
        return number

    async def answer(self, number: int, tokens: list[int], end: str | None = None) -> None:
        """The engine that has the request tells of it."""
        [link] = [link for link in self.links if number in link.requests]
        link._hear_updates(link, wire.Updates([RequestUpdate(number, tokens, finish_reason=end)]))
        await asyncio.sleep(0)

    def where(self, number: int) -> list[int]:
        return [link.replica for link in self.links if number in link.requests]

    def said(self, replica: int) -> list[Any]:
        return cast(Any, self.links[replica]._channel).said

    def adds(self, replica: int) -> dict[int, wire.Add]:
        return {each.number: each for each in self.said(replica) if isinstance(each, wire.Add)}


@pytest.fixture
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(link_module, "Channel", FakeChannel)
    fleet = Fleet(tmp_path, 2)
    await fleet.ready(0)
    yield fleet
    for task in fleet.tasks.values():
        task.cancel()
    await asyncio.gather(*fleet.tasks.values(), return_exceptions=True)
    await fleet.client.close()


async def test_one_ready_replica_is_enough_and_the_next_gets_its_share(fleet: Fleet) -> None:
    assert fleet.client.state == "ready" and fleet.client.healthy
    assert fleet.where(await fleet.submit("a")) == [0]
    await fleet.ready(1)
    assert fleet.where(await fleet.submit("b")) == [1]


async def test_requests_of_a_killed_engine_go_on_at_the_other_at_once_with_what_they_have(fleet: Fleet) -> None:
    first, second = await fleet.submit("a"), await fleet.submit("b")
    await fleet.ready(1)
    await fleet.answer(first, [5, 6])
    await fleet.die(0, [first], killed=True)
    assert fleet.where(first) == fleet.where(second) == [1]
    moved = fleet.adds(1)
    assert moved[first].output_token_ids == [5, 6] and moved[first].suspect
    assert moved[second].output_token_ids == [] and not moved[second].suspect
    await fleet.answer(first, [7], "length")
    assert fleet.outputs["a"].outputs[0].token_ids == [5, 6, 7]


async def test_a_new_engine_is_asked_though_files_were_lacking_when_it_came(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The board and the socket of an engine may be refused at first; requests then wait, and are not forgotten."""
    monkeypatch.setattr(client_module, "AGAIN_SECONDS", 0.01, raising=False)
    lacking = {"Board": 2, "Channel": 2}

    def scarce(name: str, error: Exception) -> Any:
        real = getattr(link_module, name)

        def make(*given: Any) -> Any:
            if lacking[name]:
                lacking[name] -= 1
                raise error
            return real(*given)

        return make

    monkeypatch.setattr(link_module, "Board", scarce("Board", OSError(errno.EMFILE, "too many open files")))
    monkeypatch.setattr(link_module, "Channel", scarce("Channel", zmq.ZMQError(errno.EMFILE)))
    number = await fleet.submit("a")
    orders: asyncio.Queue[bytes] = asyncio.Queue()
    following = asyncio.create_task(fleet.client._follow_supervisor(orders, lambda seconds: None))
    fleet.boots[0] += 1
    Board.create(wire.board_path(fleet.directory, 0, 2))
    for state, info in (("restarting", None), ("ready", engine_info(boot=2))):
        told = wire.EngineState(replica=0, boot=2, state=cast(Any, state), info=info, cause="killed", killed=True)
        orders.put_nowait(wire.encode(told))
    await asyncio.sleep(0.3)
    following.cancel()
    assert lacking == {"Board": 0, "Channel": 0} and fleet.client.state == "ready"
    assert fleet.where(number) == [0] and number in fleet.adds(0)


async def test_who_may_have_crashed_an_engine_is_tried_there_again_and_nowhere_else(fleet: Fleet) -> None:
    poison, innocent = await fleet.submit("a"), await fleet.submit("b")
    await fleet.ready(1)
    await fleet.die(0, [poison])
    assert fleet.where(poison) == [] and fleet.where(innocent) == [1]
    assert fleet.client.state == "ready"
    await fleet.ready(0)
    assert fleet.where(poison) == [0] and fleet.adds(0)[poison].suspect
    await fleet.die(0, [poison], culprit=poison)
    await asyncio.gather(fleet.tasks["a"])
    assert "twice" in (fleet.outputs["a"].outputs[0].error or "") and fleet.adds(1).keys() == {innocent}


async def stall(fleet: Fleet, replica: int) -> None:
    """The engine shows no sign of life for long enough, and the other one does."""
    boards = [link.board for link in fleet.links if link.replica != replica and link.board]
    fleet.links[replica].board.fields[PATIENCE] = 0  # type: ignore[union-attr]
    for _ in range(int(link_module.STALL_SECONDS / link_module.LOOK_SECONDS) + 1):
        for board in boards:
            board.fields[PULSE] += 1
        for link in fleet.links:
            link.look()
    assert fleet.links[replica].stalled
    fleet.client._leave(fleet.links[replica])
    await asyncio.sleep(0)


async def test_requests_of_an_engine_that_hangs_go_on_at_the_other_with_what_they_have(fleet: Fleet) -> None:
    first, second = await fleet.submit("a"), await fleet.submit("b")
    await fleet.ready(1)
    await fleet.answer(first, [5, 6])
    await stall(fleet, 0)
    assert fleet.where(first) == fleet.where(second) == [1]
    assert fleet.adds(1)[first].output_token_ids == [5, 6]
    assert {each.number for each in fleet.said(0) if isinstance(each, wire.Abort)} == {first, second}
    link = fleet.links[0]
    link._hear_updates(link, wire.Updates([RequestUpdate(first, [9])]))  # it wakes up
    await fleet.answer(first, [7], "stop")
    await asyncio.gather(fleet.tasks["a"])
    assert fleet.outputs["a"].outputs[0].token_ids == [5, 6, 7]


async def test_a_request_under_which_a_second_engine_hangs_stays_and_others_do_not(fleet: Fleet) -> None:
    poison, innocent = await fleet.submit("a"), await fleet.submit("b")
    await fleet.ready(1)
    await stall(fleet, 0)
    await fleet.answer(innocent, [5])
    fleet.links[0].board.fields[PULSE] += 1  # type: ignore[union-attr]
    fleet.links[0].look()
    await stall(fleet, 1)
    assert fleet.where(poison) == [1] and fleet.where(innocent) == [0]


async def test_a_request_that_another_server_can_take_over_does_not_wait_for_an_engine_that_hangs(fleet: Fleet) -> None:
    prepared = fleet.client.prepare(None, [1, 2], LONG)
    staying = await fleet.submit("a")
    leaving = fleet.client.generate(prepared, name="b", arrived=time.monotonic(), leaves=True)
    task = asyncio.create_task(anext(leaving))
    await asyncio.sleep(0)
    await stall(fleet, 0)
    with pytest.raises(EngineClosedError, match="no sign of life"):
        await task
    assert not fleet.tasks["a"].done() and fleet.where(staying) == [0]


async def test_who_waits_for_a_replica_that_is_given_up_goes_elsewhere(fleet: Fleet) -> None:
    number = await fleet.submit("a")
    await fleet.ready(1)
    await fleet.die(0, [number])
    assert fleet.where(number) == []
    await fleet.tell(0, "failed", cause="killed")
    assert fleet.where(number) == [1] and fleet.client.state == "ready"


async def test_all_wait_where_no_replica_is_ready_and_end_where_none_will_be(fleet: Fleet) -> None:
    await fleet.ready(1)
    numbers = [await fleet.submit(name) for name in "ab"]
    await fleet.die(0, killed=True)
    await fleet.die(1, killed=True)
    assert fleet.client.state == "restarting" and [fleet.where(number) for number in numbers] == [[], []]
    await fleet.ready(1)
    assert [fleet.where(number) for number in numbers] == [[1], [1]]
    await fleet.tell(0, "failed", cause="killed")
    assert fleet.client.state == "ready"
    await fleet.tell(1, "failed", cause="killed")
    await asyncio.gather(*fleet.tasks.values())
    assert {output.outputs[0].error for output in fleet.outputs.values()} == {"the engine is gone: killed"}


async def test_a_request_that_nobody_reads_any_more_is_not_sent_elsewhere(fleet: Fleet) -> None:
    number = await fleet.submit("a")
    fleet.tasks["a"].cancel()
    await asyncio.gather(fleet.tasks["a"], return_exceptions=True)
    assert any(isinstance(each, wire.Abort) and each.number == number for each in fleet.said(0))
    await fleet.ready(1)
    await fleet.die(0, killed=True)
    assert number not in fleet.adds(1) and not fleet.client._waiting and not fleet.client.num_open


async def test_whatever_engines_do_each_request_is_at_one_of_them_and_ends_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "Channel", FakeChannel)
    for seed in range(40):
        (tmp_path / str(seed)).mkdir()
        await any_schedule(Fleet(tmp_path / str(seed), 3), random.Random(seed))


async def any_schedule(fleet: Fleet, luck: random.Random) -> None:
    await fleet.ready(0)
    names: dict[int, str] = {}
    for turn in range(60):
        replica = luck.randrange(3)
        link = fleet.links[replica]
        match luck.choice(["submit", "submit", "token", "token", "end", "die", "ready", "ready", "drop"]):
            case "submit":
                names[await fleet.submit(f"r{turn}")] = f"r{turn}"
            case "token" | "end" as what if link.requests:
                number = luck.choice(sorted(link.requests))
                await fleet.answer(number, [turn], "length" if what == "end" else None)
            case "die" if link.state == "ready":
                suspects = luck.sample(sorted(link.requests), luck.randrange(len(link.requests) + 1))
                culprit = luck.choice([None, *suspects])
                await fleet.die(replica, suspects, culprit=culprit, killed=luck.random() < 0.5)
            case "ready" if link.state != "ready":
                await fleet.ready(replica)
            case "drop" if names:
                task = fleet.tasks[luck.choice(sorted(names.values()))]
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        check(fleet, names)
    for replica in range(3):
        if fleet.links[replica].state != "ready":
            await fleet.ready(replica)
    for number in names:
        if fleet.where(number):
            await fleet.answer(number, [1], "length")
    await asyncio.gather(*fleet.tasks.values(), return_exceptions=True)
    finished = [name for name, output in fleet.outputs.items() if output.finished]
    assert all(name in finished or fleet.tasks[name].cancelled() for name in names.values())
    assert not fleet.client.num_open and not fleet.client._waiting
    open_names = {names[number] for link in fleet.links for number in link.requests}
    assert all(fleet.tasks[name].cancelled() for name in open_names)  # those are being aborted
    await fleet.client.close()


def check(fleet: Fleet, names: dict[int, str]) -> None:
    client = fleet.client
    for number, name in names.items():
        places = len(fleet.where(number)) + (number in client._waiting)
        assert places <= 1
        assert places == 1 or fleet.tasks[name].done() or fleet.outputs[name].finished
    ready = [link for link in fleet.links if link.state == "ready"]
    assert not ready or all(at is not None and at not in ready for at in client._waiting.values())
    assert all(link.state == "ready" or not link.requests for link in fleet.links)


# -- where a request goes -------------------------------------------------------------------------------------


@pytest.fixture
def links(tmp_path: Path) -> list[EngineLink]:
    made = [EngineLink(cast(Any, None), tmp_path, "http-0", replica, cast(Any, None)) for replica in range(3)]
    for link in made:
        link.state, link.info, link.board = "ready", engine_info(), Board.create(tmp_path / link.name)
    return made


def placed(placement: Placement, links: list[EngineLink], number: int, prompt: list[int], scope: str = "") -> int:
    place = placement.choose(Request(number, prompt, LONG, max_tokens=9, scope=scope, arrived=0.0), links)
    placement.sent(number, place)
    return place.link.replica


def test_a_conversation_stays_where_it_is_cached_and_only_under_its_own_scope(links: list[EngineLink]) -> None:
    placement, prompt = Placement(links, KEY, alone=True), list(range(160))
    home = placed(placement, links, 0, prompt)
    placement.heard(RequestUpdate(0, [1], finish_reason="length"))
    assert placed(placement, links, 1, prompt + list(range(40))) == home
    placement.heard(RequestUpdate(1, [1], finish_reason="length"))
    assert placed(placement, links, 2, prompt, scope="another tenant") != home


def test_what_was_cached_is_forgotten_with_its_engine(links: list[EngineLink]) -> None:
    placement, prompt = Placement(links, KEY, alone=True), list(range(160))
    homes = []
    for number in range(3):
        homes.append(placed(placement, links, number, prompt))
        placement.lost(links[homes[-1]])
        placement.heard(RequestUpdate(number, [1], finish_reason="length"))  # too late: it changes nothing
    assert placement.choose(Request(9, prompt, LONG, max_tokens=9, arrived=0.0), links).tokens == 160


def test_what_an_engine_had_to_do_is_forgotten_with_it(links: list[EngineLink]) -> None:
    placement = Placement(links, KEY, alone=True)
    placement.lost(links[placed(placement, links, 0, [7] * 3000)])
    assert {placed(placement, links, number, [number] * 20) for number in range(1, 4)} == {0, 1, 2}


def test_a_busy_replica_gets_less_and_one_without_a_pulse_nothing(links: list[EngineLink]) -> None:
    placement = Placement(links, KEY, alone=True)
    board = links[0].board
    assert board is not None
    board.fields[NUM_OPEN] = 50  # another HTTP process has sent these
    links[1]._pulse = (-1, time.monotonic() - 1000)
    assert [placed(placement, links, number, [number] * 20) for number in range(6)] == [2] * 6


def test_requests_that_wait_for_their_first_tokens_count_as_much_as_those_that_decode(links: list[EngineLink]) -> None:
    placement, prompt = Placement(links, KEY, alone=True), list(range(32))
    assert {placed(placement, links, number, prompt) for number in range(8)} == {0, 1, 2}  # not all where it is cached


def test_several_http_processes_send_prompts_that_begin_alike_to_the_same_replica(links: list[EngineLink]) -> None:
    several = [Placement(links, KEY, alone=False) for _ in range(3)]
    homes = []
    for number in range(30):
        prompts = [[number] * 16 + [100 + process] * 60 for process in range(3)]
        [home] = {placed(each, links, number, prompt) for each, prompt in zip(several, prompts, strict=True)}
        for each in several:
            each.heard(RequestUpdate(number, [1], finish_reason="length"))
        homes.append(home)
    assert set(homes) == {0, 1, 2}  # and not all to one
