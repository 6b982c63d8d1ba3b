"""Shared by all tests: one thread, since the tests' matrices are tiny and a second thread only waits; Triton's kernels
in its interpreter, which must be chosen before they are imported; no looking for garbage in what importing and
collecting make, which stays; and of hypothesis the same examples in every run, on a machine that may be slow (fewer of
them where they are run for each of many mutants). Ctrl-C is handled as in a terminal: a shell starts what it puts in
the background with SIGINT ignored. Torch is not imported here, since `make check` has tests that need none of it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests.costs import Costs
from tests.http_tools import CHECKED, ServeProcess

if TYPE_CHECKING:
    from tests.router_fakes import Loop

gc.disable()  # until tests are collected: it is a third of what that takes
os.environ["TRITON_INTERPRET"] = "1"
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
hypothesis.settings.register_profile(
    "quire", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile(
    "mutants", hypothesis.settings.get_profile("quire"), max_examples=20, phases=[hypothesis.Phase.generate]
)
hypothesis.settings.load_profile("quire")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", default="", metavar="FILE", help="write what each test costs, a line of JSON each")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(config.getoption("--costs")))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the cases of a test that is marked as `quick`, those that the mark does not choose are slow.

    Raises:
        pytest.UsageError: it names one that there is not.
    """
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("quick"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test, cases in tests.items():
        mark = next(cases[0].iter_markers("quick"))
        every = mark.kwargs.get("every")
        chosen = cases[::every] if every else [case for case in cases if case.callspec.id in mark.args]
        if not every and len(chosen) < len(mark.args) and not any("::" in given for given in config.args):
            missing = set(mark.args) - {case.callspec.id for case in chosen}
            raise pytest.UsageError(f"{test} is marked as quick for {sorted(missing)}, which are none of its cases")
        for case in set(cases).difference(chosen):
            case.add_marker("slow")


def pytest_collection_finish() -> None:
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test logs or prints may be no valid Unicode; xdist cannot send that, and would lose the worker by it."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


def pytest_unconfigure() -> None:
    gc.unfreeze()  # some libraries look at exit whether all of theirs is gone


@pytest.fixture(scope="session", autouse=True)
def spawn_beside() -> Iterator[Callable[..., Any]]:
    """Ranks of engines in this process are forks of one that has torch already, see `tests/forks.py`; the real one."""
    from quire import child

    def spawn_rank(*given: Any, **more: Any) -> Any:
        from tests.forks import spawn_rank

        return spawn_rank(*given, **more)

    real = child.spawn_beside
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "spawn_beside", spawn_rank)
        yield real


@pytest.fixture
def spawned_ranks(spawn_beside: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are processes of their own, as everywhere else."""
    monkeypatch.setattr("quire.child.spawn_beside", spawn_beside)


@pytest.fixture
def cluster_key(tmp_path: Path) -> str:
    """A file with the key of a cluster, for its user alone."""
    key = tmp_path / "key"
    key.write_text("a secret of this cluster")
    key.chmod(0o600)
    return str(key)


@pytest.fixture(scope="session")
def interfaces_server() -> Iterator[ServeProcess]:
    """A server with two tenants and a short queue, for the tests of several interfaces."""
    keys = ("--api-key", "k1", "--api-key", "k2", "--admin")
    with ServeProcess(*keys, *CHECKED, "--max-queued-requests", "4", key="k1") as process:
        yield process


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    """An event loop in a thread, for servers that stand in for others."""
    from tests.router_fakes import Loop

    one = Loop()
    yield one
    one.close()
