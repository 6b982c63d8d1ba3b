"""The compiled kernels as a whole: which were built, which may be asked for, and whose threads they use."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from quire.core.sampling_params import SamplingParams
from quire.errors import ConfigError
from quire.llm import LLM
from quire.ops import Kernels, choice_note, choose, choose_kernels
from quire.ops.cpu import library
from quire.ops.cpu.instruction_sets import bits_of
from quire.ops.cpu.kernels import CpuKernels
from quire.ops.cpu.library import Library
from quire.ops.linear import Product

needs_library = pytest.mark.skipif(not library.usable(), reason="no compiled kernels: was there a C++ compiler?")


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Quire had been installed without a compiler, on Linux on x86_64."""
    monkeypatch.setattr(library, "built", dict)
    pretend_machine(monkeypatch, "x86_64", "sse2 avx2 fma f16c")


def pretend_machine(monkeypatch: pytest.MonkeyPatch, machine: str, flags: str, system: str = "Linux") -> None:
    monkeypatch.setattr(library.platform, "system", lambda: system)
    monkeypatch.setattr(library.platform, "machine", lambda: machine)
    monkeypatch.setattr(library, "cpu_flags", lambda: frozenset(flags.split()))


def pretend_built(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(library, "built", lambda: {name: Path(f"lib_{name}.so") for name in names})


@needs_library
@pytest.mark.parametrize("isa", library.usable())
def test_every_usable_set_of_kernels_can_be_chosen(isa: str) -> None:
    kernels = choose_kernels(isa)
    assert isinstance(kernels, CpuKernels) and kernels.name == isa
    described = kernels.describe(torch.bfloat16)
    assert f"C++ kernels {library.VERSION} for {bits_of(isa)}, torch {torch.__version__}" in described


class PretendedKernels(Kernels):
    """Plain torch's, under the name of an instruction set, with a weight of which one entry is read wrongly."""

    def __init__(self, isa: str, wrong: bool) -> None:
        super().__init__()
        self.name, self.wrong = isa, wrong

    def pack(
        self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None, outputs: int | None = None
    ) -> Product:
        parts = [part.clone() for part in parts]
        if self.wrong:
            parts[0][0, 0] += 100
        return super().pack(parts, bias)


def pretend_amx(monkeypatch: pytest.MonkeyPatch, *built: str, wrong: bool) -> None:
    """A machine with all that x86_64 has, whose AMX multiplies rightly or not."""
    pretend_built(monkeypatch, *built)
    pretend_machine(monkeypatch, "x86_64", " ".join(frozenset().union(*library.NEEDS.values())))
    monkeypatch.setattr(choose, "CpuKernels", lambda isa, *rest: PretendedKernels(isa, wrong and isa == "amx"))
    monkeypatch.setattr(choose, "failed_checks", choose.failed_checks.__wrapped__)


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ("sse2", "sse2"),
        ("sse2 avx2 fma f16c", "avx2"),
        ("sse2 avx2 fma f16c avx_vnni", "avx_vnni"),
        ("sse2 avx2 fma f16c avx512f avx512bw avx512vl avx512dq", "avx512"),
        ("sse2 avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni", "avx512_vnni"),
        ("sse2 avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_bf16 avx512_vnni avx512vbmi", "avx512_bf16"),
        ("", "torch"),
    ],
)
def test_the_fastest_is_chosen_unless_torch_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, flags: str, chosen: str
) -> None:
    pretend_amx(monkeypatch, *library.NEEDS, wrong=False)
    pretend_machine(monkeypatch, "x86_64", flags)
    assert choose_kernels().name == chosen
    assert type(choose_kernels("torch")) is Kernels


def test_amx_is_chosen_where_it_is_there_and_multiplies_rightly(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_amx(monkeypatch, "amx", "avx512_bf16", wrong=False)
    assert choose_kernels().name == "amx" and choice_note() is None


def test_amx_that_multiplies_wrongly_is_told_of_and_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_amx(monkeypatch, "amx", "avx512_bf16", wrong=True)
    assert choose_kernels().name == "avx512_bf16"
    note = choice_note()
    failed = "linear bfloat16, latent attention bfloat16"  # of the latter, the products of its heads
    assert note and note.startswith(f"the kernels for amx fail their self-test on this machine ({failed}): slower")
    assert "quire doctor --cpu-kernels amx" in note
    assert choose_kernels("amx").name == "amx"  # whoever asks for it gets it
    pretend_built(monkeypatch, "amx")
    assert choose_kernels().name == "torch"


@needs_library
@pytest.mark.parametrize("isa", library.usable())
def test_the_kernels_have_as_many_threads_as_they_are_told_and_torch_has_one_meanwhile(isa: str) -> None:
    kernels, lib, before = CpuKernels(isa), Library(isa, {}), torch.get_num_threads()
    with kernels.threads(3):
        assert (lib.threads(), torch.get_num_threads()) == (3, 1)
        with kernels.threads(2):
            assert lib.threads() == 2
        assert lib.threads() == 3
    assert (lib.threads(), torch.get_num_threads()) == (1, before)


@needs_library
def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    isa = library.usable()[-1]
    with pytest.raises(ConfigError, match=r"no function quire_not_there: .*install Quire again"):
        Library(isa, {"not_there": (None, ())})
    monkeypatch.setattr(library, "VERSION", library.VERSION + 1)
    with pytest.raises(ConfigError, match=rf"are version \d+, not {library.VERSION}: .*install Quire again"):
        Library(isa, {})


def test_a_file_that_is_no_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "lib_sse2.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(library, "built", lambda: {"sse2": broken})
    pretend_machine(monkeypatch, "x86_64", "sse2")
    with pytest.raises(ConfigError, match=r"'sse2' cannot be loaded: .*install Quire again"):
        Library("sse2", {})


def test_an_instruction_set_that_the_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_built(monkeypatch, "avx2", "sse2")
    pretend_machine(monkeypatch, "x86_64", "sse2")
    with pytest.raises(ConfigError) as caught:
        LLM("demo", cpu_kernels="avx2")
    message = str(caught.value)
    assert "this machine cannot run the kernels for 'avx2': it lacks avx2, f16c, fma" in message
    assert message.endswith("this machine has kernels for sse2, and plain torch: 'torch'")


def test_an_instruction_set_that_was_not_built_is_refused(nothing_built: None) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_kernels("avx512")
    message = str(caught.value)
    assert message.startswith("the kernels for 'avx512' were not built; there is only plain torch: 'torch'")
    assert "install g++" in message


def test_a_name_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="cpu_kernels='avx1024' is not supported; allowed: auto, torch, sse2"):
        LLM("demo", cpu_kernels="avx1024")


def test_without_compiled_kernels_the_torch_path_runs_and_says_so(nothing_built: None) -> None:
    llm = LLM("demo", num_kv_blocks=64)
    try:
        assert "the compiled kernels were not built: the slower torch path runs; install g++" in " ".join(llm.notes)
        assert llm.generate("x", SamplingParams(max_tokens=2, temperature=0.0))
    finally:
        llm.close()


@pytest.mark.parametrize(
    ("built", "machine", "flags", "system", "what"),
    [
        (["sse2"], "x86_64", "sse2", "Linux", None),
        (["avx2", "sse2"], "x86_64", "sse2 avx2 fma f16c", "Linux", None),
        (["sse2"], "x86_64", "sse2 avx2 fma f16c", "Linux", "the kernels for avx2, which this machine could run"),
        ([], "aarch64", "asimd asimddp atomics", "Linux", "the compiled kernels were not built"),
        (["neon"], "aarch64", "asimd asimddp atomics", "Linux", "the kernels for neon_dot, which this machine"),
        (
            ["neon_dot"],
            "aarch64",
            "asimd asimddp atomics bf16",
            "Linux",
            "the kernels for neon_bf16, which this machine",
        ),
        ([], "arm64", "asimd asimddp atomics", "Darwin", "the compiled kernels were not built"),
        (["neon_dot"], "arm64", "asimd asimddp atomics", "Darwin", None),
        ([], "x86_64", "sse2", "Darwin", "there are no compiled kernels for x86_64 on Darwin"),
        ([], "riscv64", "", "Linux", "there are no compiled kernels for riscv64 on Linux"),
    ],
)
def test_what_an_installation_lost_is_told(
    monkeypatch: pytest.MonkeyPatch, built: list[str], machine: str, flags: str, system: str, what: str | None
) -> None:
    pretend_built(monkeypatch, *built)
    pretend_machine(monkeypatch, machine, flags, system)
    monkeypatch.setattr(choose, "failed_checks", lambda isa: ())
    lost = library.missed()
    assert (lost is None) == (what is None)
    if lost and what:
        assert lost.what.startswith(what) and lost.remedy
        assert choice_note("auto") == f"{lost.what}; {lost.remedy}"
    assert choice_note("torch") is None  # whoever asks for it knows


def test_libraries_of_another_python_do_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    (tmp_path / "lib_avx2.cpython-399-x86_64-linux-gnu.so").touch()
    (tmp_path / f"lib_sse2{sysconfig.get_config_var('EXT_SUFFIX')}").touch()
    assert list(library.built.__wrapped__()) == ["sse2"]
