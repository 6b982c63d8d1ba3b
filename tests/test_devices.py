"""Which device is chosen, what is refused, and how numbers reach a GPU, as far as that can be seen without one."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from quire import devices
from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.errors import ConfigError, DeviceError
from quire.ops.kv_cache import on_device
from quire.runner.device import CudaDevice, Device, RecordingError, check_cuda, is_lost
from tests.devices import Unpinned
from tests.oracle import save_checkpoint


class FakeDriver:
    """Stands for libcuda.so.1 with so many GPUs, or one whose first call fails."""

    def __init__(self, count: int, broken: bool = False) -> None:
        self._count, self._broken = count, broken

    def cuInit(self, flags: int) -> int:
        return int(self._broken)

    def cuDeviceGetCount(self, pointer: Any) -> int:
        pointer._obj.value = self._count
        return 0


def with_driver(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver | None, cuda_torch: bool = True) -> None:
    def load(name: str) -> FakeDriver:
        if driver is None:
            raise OSError("libcuda.so.1: cannot open shared object file")
        return driver

    monkeypatch.setattr(devices.ctypes, "CDLL", load)
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: cuda_torch)


@pytest.mark.parametrize("driver", [None, FakeDriver(0), FakeDriver(2, broken=True)])
def test_without_a_gpu_the_cpu_is_chosen_without_a_word(monkeypatch, driver):
    with_driver(monkeypatch, driver)
    assert devices.find_device() == ("cpu", None)
    config = EngineConfig.from_options({"model": "m"})
    assert (config.device, config.max_num_seqs, config.deterministic) == ("cpu", 64, True)
    assert not config.async_scheduling, "cores that compute do not wait for the scheduler"


def test_a_gpu_is_chosen_with_its_own_defaults(monkeypatch):
    with_driver(monkeypatch, FakeDriver(1))
    config = EngineConfig.from_options({"model": "m"})
    assert (config.device, config.max_num_seqs, config.max_num_batched_tokens) == ("cuda", 256, 8192)
    assert config.async_scheduling and config.deterministic
    assert EngineConfig.from_options({"model": "m", "deterministic": True}).deterministic
    assert EngineConfig.from_options({"model": "m"}, "chat").max_num_seqs == 16, "a preset wins over a device"
    assert EngineConfig.from_options({"model": "m", "device": "cpu"}).max_num_seqs == 64


def test_a_gpu_that_the_installed_torch_cannot_use_is_told(monkeypatch):
    with_driver(monkeypatch, FakeDriver(1), cuda_torch=False)
    kind, note = devices.find_device()
    assert kind == "cpu" and note is not None and "built for CPUs only" in note


def test_a_gpu_that_is_not_used_stands_in_the_engines_notes(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "count_gpus", lambda: 1)
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: False)
    engine = Engine(EngineConfig(model=str(save_checkpoint(tmp_path, "qwen3")), threads=1))
    assert any("built for CPUs only" in note for note in engine.notes)


def test_what_is_for_gpus_is_told_to_change_nothing_on_a_cpu(tmp_path):
    config = EngineConfig(
        model=str(save_checkpoint(tmp_path, "qwen3")), device="cpu", gpu_memory_utilization=0.5, cuda_graphs="off"
    )
    notes = Engine(config).notes
    assert "gpu_memory_utilization=0.5 has no effect on a CPU" in notes
    assert "cuda_graphs=off has no effect on a CPU" in notes


# -- what is refused ---------------------------------------------------------------------------------------


def cuda(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), count: int = 1) -> None:
    """As if this torch had CUDA."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")


def test_cuda_is_refused_where_torch_has_none(tmp_path):
    with pytest.raises(DeviceError, match="built for CPUs only; install torch with CUDA"):
        Engine(EngineConfig(model=str(save_checkpoint(tmp_path, "qwen3")), device="cuda"))


def test_cuda_is_refused_where_there_is_no_gpu(monkeypatch):
    cuda(monkeypatch, count=0)
    with pytest.raises(DeviceError, match=r"there is no GPU 0 here \(0 found\); check nvidia-smi"):
        check_cuda()


def test_an_old_gpu_is_refused(monkeypatch):
    cuda(monkeypatch, capability=(7, 5))
    with pytest.raises(DeviceError, match=r"Some GPU has compute capability 7.5; Quire's kernels need 8.0"):
        check_cuda()


@pytest.mark.parametrize(("version", "message"), [("3.5.1", "Triton 3.5.1 is too old"), (None, "needs Triton")])
def test_an_old_or_missing_triton_is_refused(monkeypatch, version, message):
    cuda(monkeypatch)
    found = None if version is None else SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, "triton", found)
    with pytest.raises(DeviceError, match=message):
        check_cuda()


def test_a_triton_that_cannot_build_its_connection_to_the_driver_is_refused(monkeypatch):
    class Active:
        @property
        def utils(self):
            raise RuntimeError("Failed to find C compiler")

    cuda(monkeypatch)
    runtime = SimpleNamespace(driver=SimpleNamespace(active=Active()))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.0", runtime=runtime))
    with pytest.raises(DeviceError, match=r"cannot start here: Failed to find C compiler.*gcc or clang"):
        check_cuda()


def test_a_refusal_is_a_configuration_error():
    assert issubclass(DeviceError, ConfigError)


# -- moving numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [Device(), Unpinned()], ids=["cpu", "packed"])
def test_arrays_arrive_as_they_are_and_may_change_after(device):
    arrays = [
        np.arange(5, dtype=np.int32),
        np.zeros(0, np.int64),
        np.array([[1.5, -2.0], [3.0, 4.0], [5.0, 6.0]], np.float32),
        np.array([True, False, True]),
        np.array([2**62, -1], np.int64),
        np.arange(12, dtype=np.float64)[::2],
        np.ones(3, [("a", np.int8), ("b", np.float32)])["b"],  # a column of a table
    ]
    wanted = [torch.from_numpy(array.copy()) for array in arrays]
    sent = device.upload(*arrays)
    for array in arrays:
        array[...] = 0
    for tensor, want in zip(sent, wanted, strict=True):
        assert tensor.dtype == want.dtype and torch.equal(tensor, want)
    into = torch.zeros(5, dtype=torch.int32)
    device.write(into, np.arange(5, dtype=np.int32))
    assert into.tolist() == [0, 1, 2, 3, 4]


def test_what_a_gpu_copies_while_the_host_goes_on_lies_in_pinned_memory(monkeypatch):
    """Out of other memory CUDA may copy only once all that was queued before has run."""
    seen = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: seen.append("pinned") or tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, non_blocking: seen.append(non_blocking) or tensor)
    for numbers in ([(3, 1, 7), (5, 2, 16)], torch.arange(4)):
        assert torch.equal(on_device(numbers, torch.device("cuda")), torch.as_tensor(numbers))
    assert seen == ["pinned", True] * 2
    on_device([1, 2], torch.device("cpu"))
    assert seen[4:] == [True]


# -- recording ---------------------------------------------------------------------------------------------


class FakeGraph:
    """Stands for torch.cuda.CUDAGraph. Its pool lives, as torch's do, as long as a graph that was recorded in it."""

    alive: ClassVar[dict[int, int]] = {}  # graphs of each pool; 0: they are gone
    recording: ClassVar[bool] = False
    error: ClassVar[Exception | None] = None  # from the driver, when a recording ends

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert not self.recording, "the one before was not ended"
        assert not gc.isenabled(), "what is collected meanwhile would be recorded, too"
        assert self.alive.get(pool) != 0, "torch: INTERNAL ASSERT FAILED, use_count > 0"
        self.graphs, self.pool, FakeGraph.recording = self.alive, pool, True
        self.graphs[pool] = self.graphs.get(pool, 0) + 1

    def capture_end(self) -> None:
        FakeGraph.recording = False
        if self.error is not None:
            raise self.error

    def replay(self) -> None:
        pass

    def __del__(self) -> None:
        self.graphs[self.pool] -= 1


@pytest.fixture
def recorder(monkeypatch) -> CudaDevice:
    monkeypatch.setattr(FakeGraph, "alive", {})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", itertools.count().__next__)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    device = Unpinned()
    device._stream, device._graphs, device._pool = None, weakref.WeakSet(), -1
    return device


def test_graphs_share_a_pool_and_a_new_one_is_taken_when_they_are_gone(recorder):
    graphs = [recorder.record(lambda: 5) for _ in range(3)]
    assert [made for _, made in graphs] == [5, 5, 5] and FakeGraph.alive == {0: 3}
    graphs.clear()
    again = recorder.record(lambda: 6)
    assert FakeGraph.alive == {0: 0, 1: 1}
    del again


def test_memory_that_does_not_suffice_for_a_recording_is_told_apart_and_harms_no_later_one(recorder, monkeypatch):
    def fail() -> None:
        raise torch.OutOfMemoryError("allocator")

    with pytest.raises(torch.OutOfMemoryError, match="allocator"):
        recorder.record(fail)
    monkeypatch.setattr(FakeGraph, "error", torch.AcceleratorError("CUDA error: out of memory"))
    with pytest.raises(torch.OutOfMemoryError, match="CUDA error"):
        recorder.record(lambda: None)
    monkeypatch.setattr(FakeGraph, "error", None)
    assert recorder.record(lambda: 7)[1] == 7
    assert gc.isenabled()


def test_what_cannot_be_recorded_is_told_apart_from_a_device_that_fails(recorder, monkeypatch):
    refused = torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")
    monkeypatch.setattr(FakeGraph, "error", refused)
    with pytest.raises(RecordingError, match="not permitted when stream is capturing") as found:
        recorder.record(lambda: None)
    assert not is_lost(found.value)
    failed = torch.AcceleratorError("CUDA error: an illegal memory access")
    asked = itertools.count()

    def synchronize(device: torch.device) -> None:
        if next(asked) > 0:  # it fails in between
            raise failed

    monkeypatch.setattr(FakeGraph, "error", failed)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(torch.AcceleratorError, match="illegal") as lost:
        recorder.record(lambda: None)
    assert is_lost(lost.value)


# -- this machine ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "count"), [(0, 3), (0, 0), (100, 0)], ids=["three GPUs", "none", "no device"])
def test_the_driver_is_asked_for_real_here(tmp_path, status, count):
    """A library with the driver's name is loaded and called, in a process of its own: whatever this machine has."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = tmp_path / "driver.c"
    source.write_text(
        f"int cuInit(unsigned flags) {{ return flags ? 1 : {status}; }}\n"
        f"int cuDeviceGetCount(int *count) {{ *count = {count or 7}; return {count} ? 0 : 100; }}\n"
    )
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(tmp_path / "libcuda.so.1")], check=True)
    code = "from quire.devices import count_gpus; print(count_gpus())"
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == (str(count), "")
