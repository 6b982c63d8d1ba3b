"""`quire doctor`, and the row-invariance self-test that it runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from quire.cli.doctor import Package, machine, memory, missing_packages, slow_instruction_sets
from quire.cli.main import main
from quire.ops import CodedWeight, Kernels, KVCache, Product, RaggedBatch, StoredWeight, choose_kernels, self_test
from quire.ops.cpu import library
from quire.ops.fp8 import Fp8Weight
from quire.ops.mxfp4 import Mxfp4Weight
from quire.ops.ragged import Trees

CPUINFO = """\
processor\t: 0
model name\t: Some CPU 9000
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu avx2 avx512f avx512_bf16

processor\t: 1
model name\t: Some CPU 9000
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu avx2 avx512f avx512_bf16

processor\t: 2
model name\t: Some CPU 9000
physical id\t: 1
core id\t\t: 0
flags\t\t: fpu avx2 avx512f avx512_bf16
"""


def test_a_fleet_is_told_which_kernels_all_of_its_machines_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def report(name: str, *usable: str) -> str:
        path = tmp_path / name
        path.write_text(json.dumps({"kernels": {"usable": usable}}))
        return str(path)

    new, old = report("new", "amx", "avx512", "avx2", "sse2"), report("old", "avx2", "sse2")
    assert main(["doctor", "--fleet", new, old]) == 0
    assert (
        "All of them have avx2, sse2; for equal tokens give all servers --cpu-kernels avx2" in capsys.readouterr().out
    )
    cascade_lake, ice_lake = report("cascade", "avx512_vnni", "avx512", "avx2"), report("ice", "avx512", "avx2")
    assert main(["doctor", "--fleet", cascade_lake, ice_lake]) == 0
    advice = "--cpu-kernels avx512, or where there is avx512_vnni, that: its bits are the same"
    assert advice in capsys.readouterr().out
    assert main(["doctor", "--json", "--fleet", new, report("arm", "neon")]) == 1
    assert json.loads(capsys.readouterr().out)["common"] == []
    (tmp_path / "text").write_text("Machine")
    assert main(["doctor", "--fleet", str(tmp_path / "text")]) != 0
    assert "run that on each machine" in capsys.readouterr().err


def test_the_report_says_all_that_was_promised(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--full"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["machine"]["usable_threads"] >= 1 and isinstance(report["machine"]["instruction_sets"], list)
    assert 0 < report["memory"]["available"] <= report["memory"]["total"]
    assert report["versions"]["torch"] == torch.__version__
    assert report["threads"] == torch.get_num_threads()
    assert report["kernels"]["built"] == list(library.built())
    assert report["kernels"]["usable"] == library.usable()
    assert report["kernels"]["chosen"] == choose_kernels().name
    assert report["kernels"]["described"]["bfloat16"] == choose_kernels().describe(torch.bfloat16)
    names = [check["name"] for check in report["self_test"]]
    assert {
        "linear bfloat16",
        "linear int8",
        "linear mxfp4",
        "experts mxfp4",
        "norm and gate float32",
        "attention bfloat16, fp8 cache",
    } <= set(names)
    assert {"routing by groups", "experts bfloat16", "experts int4", "latent attention bfloat16"} <= set(names)
    assert {
        "gated delta net bfloat16",
        "attention in trees, float32",
        "latent attention in trees, bfloat16, int8 cache",
    } <= set(names)
    assert all(check["passed"] and check["cases"] > 5 for check in report["self_test"])
    assert report["demo_model"]["present"]


def test_a_kernel_whose_rows_depend_on_one_another_fails_the_doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = Kernels()
    right = kernels.rms_norm

    def wrong(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """One more unit in the last place for a lone row: what a different order of summing would do."""
        out = right(x, weight, eps)
        return torch.nextafter(out, torch.full_like(out, 1e9)) if len(x) == 1 else out

    monkeypatch.setattr(kernels, "rms_norm", wrong)
    monkeypatch.setattr("quire.ops.choose_kernels", lambda *args: kernels)
    monkeypatch.setattr(self_test, "run", lambda kernels: [self_test.check_norm_and_gate(kernels, torch.float32)])
    assert main(["doctor", "--full"]) == 1
    out = capsys.readouterr().out
    assert "DIFFERS in 3 of 28" in out
    assert "PROBLEM: row-invariance self-test: norm and gate float32" in out
    assert out.rstrip().endswith("Quire is not ready.")


def test_the_self_test_notices_attention_that_depends_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels()
    right = kernels.attend

    def wrong(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        out = right(q, *rest)
        return out * 1.01 if len(q) == 44 else out

    monkeypatch.setattr(kernels, "attend", wrong)
    failures = self_test.check_attention(kernels, torch.float32).failures
    assert failures == ("block size 16, chunks [128, 128, 44]", "block size 16, chunks [255, 1, 44]")


def test_the_self_test_notices_rows_of_a_tree_that_see_other_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Kernels):
        def attend(self, q: torch.Tensor, kv: KVCache, batch: RaggedBatch, *rest: Any) -> torch.Tensor:
            if batch.trees is not None:  # the last row goes on from the root
                paths = batch.trees.paths.clone()
                paths[-1, :-1] = paths[-1, 0]
                batch = replace(batch, trees=Trees(batch.trees.bases, paths))
            return super().attend(q, kv, batch, *rest)

        def attend_latent(self, q: torch.Tensor, *rest: Any) -> torch.Tensor:
            out = super().attend_latent(q, *rest)
            return out * 1.01 if rest[1].trees is not None else out  # all rows of a tree

    monkeypatch.setattr(self_test, "TREE_BASES", (120,))
    failures = self_test.check_trees(Wrong(), torch.float32).failures
    assert [failure.partition(", path")[0] for failure in failures] == [
        "block size 16, tree at 120",
        "block size 64, tree at 120",
        "tree at 120, against plain torch",
    ]
    assert all(failure.endswith("23]") for failure in failures[:2])
    check = self_test.check_latent_trees(Wrong(), torch.bfloat16, "int8")
    assert check.cases > 6 and len(check.failures) == check.cases - 1  # no row is far from plain torch's
    assert self_test.check_trees(Kernels(), torch.bfloat16, "fp8").passed


@pytest.mark.slow
def test_the_self_test_notices_sparse_kernels_that_err_or_depend_on_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Kernels):
        def route(self, logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
            ids, weights = super().route(logits, *rest)
            return ids, weights * 1.01  # the same for all rows

        def experts(self, *products: Any) -> Any:
            right = super().experts(*products)
            return lambda x, ids, weights: right(x, ids, weights) * (1.01 if len(x) == 9 else 1.0)

        def attend_latent(self, q: torch.Tensor, *rest: Any) -> torch.Tensor:
            out = super().attend_latent(q, *rest)
            out[-1, -1] = 0.0  # the last head of a step's last row
            return out

    kernels = Wrong()
    assert self_test.check_routing(kernels, "groups").failures == ("against plain torch",)
    nines = ("rows 0 to 8 with 1 thread", "rows 7 to 15 with 1 thread")
    assert self_test.check_experts(kernels, torch.float32).failures == nines
    failures = self_test.check_latent_attention(kernels, torch.bfloat16, "int8").failures
    assert "against plain torch" in failures and "block size 16, chunks [299, 1]" in failures
    assert all(
        check.passed
        for check in (
            self_test.check_routing(Kernels(), "softmax"),
            self_test.check_experts(Kernels(), self_test.QUANTIZATIONS[1]),
        )
    )


@pytest.mark.slow
def test_the_self_test_notices_a_choice_of_positions_that_depends_on_other_rows() -> None:
    class Wrong(Kernels):
        def choose(self, q: torch.Tensor, *rest: Any) -> None:
            super().choose(q, *rest)
            slots = rest[-1].slots
            if len(q) == 1:  # the only row of a step that chooses sees one token alone
                slots[:] = slots[:, :1]

    failures = self_test.check_sparse_attention(Wrong(), torch.bfloat16).failures
    assert failures == tuple(f"block size 16, chunks {chunks}" for chunks in ([255, 1, 44], [299, 1]))
    assert self_test.check_sparse_attention(Kernels(), torch.bfloat16).passed


def test_kernels_that_were_not_built_are_told_of_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(library, "built", dict)
    monkeypatch.setattr(library.platform, "system", lambda: "Linux")
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(library, "cpu_flags", lambda: frozenset({"sse2"}))
    monkeypatch.setattr(self_test, "run_short", lambda *given: [])
    assert main(["doctor"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "built none: only plain torch usable here none: only plain torch chosen torch" in out
    assert "note: the compiled kernels were not built: the slower torch path runs -> install g++" in out


def test_the_doctor_tells_of_kernels_that_fail_the_self_test_at_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(self_test, "run_short", lambda *given: [])
    monkeypatch.setattr(library, "usable", lambda: ["amx"])
    monkeypatch.setattr("quire.ops.choose.failed_checks", lambda isa: ("linear int8",))
    assert main(["doctor"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "chosen torch" in out and "note: the kernels for amx fail their self-test on this machine (linear int8)" in out
    )


@pytest.mark.slow
def test_the_self_test_notices_kernels_that_err(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Kernels):
        def pack(
            self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None, outputs: int | None = None
        ) -> Product:
            return super().pack([part * 1.1 for part in parts], bias)

        def pack_coded(
            self, parts: Sequence[CodedWeight], bias: torch.Tensor | None = None, outputs: int | None = None
        ) -> Product:
            return super().pack_coded([replace(part, factors=torch.full((len(part.codes),), 1.1)) for part in parts])

        def pack_mxfp4(self, parts: Sequence[Mxfp4Weight], bias: torch.Tensor | None = None) -> Product:
            wrong = [replace(part, codes=part.codes ^ 16) for part in parts]  # one step, every second number
            return super().pack_mxfp4(wrong, bias)

        def attend(self, q: torch.Tensor, kv: KVCache, *given: Any) -> torch.Tensor:
            return super().attend(q, kv, *given) * 1.1

    checks = list(self_test.run_short(Wrong()))
    linear = [f"linear {form}" for form in ("bfloat16", "int8", "int6", "int4", "mxfp4")]
    assert [check.name for check in checks] == [*linear, "attention bfloat16", "latent attention bfloat16"]
    assert all(check.failures == (check.failures[0],) for check in checks)
    assert all(check.failures[0].endswith("against plain torch") for check in checks)
    assert all(check.passed for check in self_test.run_short(Kernels()))


def test_weights_in_fp8_are_tried_where_kernels_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Kernels):
        def keeps(self, weight: StoredWeight) -> bool:
            return True

        def pack_fp8(self, parts: Sequence[Fp8Weight], dtype: torch.dtype, *given: Any) -> Product:
            """Many rows are multiplied with other numbers than few."""
            right = super().pack_fp8(parts, dtype, *given)
            wrong = super().pack_fp8([replace(part, scales=part.scales * 1.1) for part in parts], dtype, *given)
            return cast(Product, SimpleNamespace(matmul=lambda x: (right if len(x) < 70 else wrong).matmul(x)))

    monkeypatch.setattr(self_test, "FP8_ROWS", 80)
    monkeypatch.setattr(self_test, "QUANTIZATIONS", ())
    monkeypatch.setattr(self_test, "SHORT_SHAPES", ())
    names = {kernels: [check.name for check in self_test.run_short(kernels)] for kernels in (Kernels(), Wrong())}
    assert ["linear fp8" in each for each in names.values()] == [False, True]
    fp8 = self_test.check_quantized_linear(Wrong(), "fp8")
    assert len(fp8.failures) == fp8.cases - 1, "all but the whole beside itself"
    assert fp8.failures[-1] == "against plain torch"


def test_the_doctor_tests_the_kernels_that_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(self_test, "run_short", lambda *given: [])
    assert main(["doctor", "--json", "--cpu-kernels", "torch"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"]["chosen"] == "torch"
    assert main(["doctor", "--cpu-kernels", "avx1024"]) == 2
    assert "the kernels for 'avx1024' were not built" in capsys.readouterr().err


def test_the_doctor_is_quick_unless_it_is_asked_for_the_full_self_test(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(self_test, "run", None)  # to call it would fail
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "linear mxfp4" in out and "experts" not in out and "'quire doctor --full' tests every kernel" in out


def test_lines_come_as_soon_as_something_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def checks(kernels: Kernels) -> Iterator[self_test.Check]:
        for name in ("first", "second"):
            seen.append(capsys.readouterr().out)
            yield self_test.Check(name, 3, ())

    monkeypatch.setattr(self_test, "run_short", checks)
    assert main(["doctor"]) == 0
    before, between = seen
    assert all(word in before for word in ("Machine", "Packages", "torch", "Kernels", "Self-test"))
    assert between.split() == ["first", "bit-equal", "in", "3", "cases"]


def test_every_package_of_the_metadata_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(self_test, "run_short", lambda kernels: [])
    assert main(["doctor", "--json"]) == 0
    versions = json.loads(capsys.readouterr().out)["versions"]
    for text in metadata.requires("quire-llm") or ():
        assert re.match(r"[\w.-]+", text)[0] in versions, text  # type: ignore[index]


def test_a_package_of_an_extra_may_be_missing_and_is_named_with_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requires = ["numpy>=1.26", 'nowhere>=2.0; extra == "some"', 'rich>=1000; extra == "others"']
    monkeypatch.setattr(self_test, "run_short", lambda kernels: [])
    monkeypatch.setattr("quire.cli.doctor.metadata.requires", lambda name: requires)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"nowhere +not installed \(optional: pip install '\.\[some\]'\)", out)
    assert re.search(r"note: rich [\d.]+ is too old\n  -> pip install 'rich>=1000'", out)


def test_the_machine_is_read_from_cpuinfo() -> None:
    found = machine(CPUINFO)
    assert (found["cpu"], found["cores"]) == ("Some CPU 9000", 2)
    assert found["instruction_sets"] == ["avx2", "avx512f", "avx512_bf16"]
    assert machine("")["instruction_sets"] == []
    virtual = "cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n"
    assert machine(virtual)["cpu"] == "AMD EPYC, family 25 model 17"


def test_the_memory_is_read_from_meminfo() -> None:
    assert memory("MemTotal: 2048 kB\nMemAvailable:  1024 kB\n") == {"total": 2 << 20, "available": 1 << 20}
    assert memory("") == {"total": None, "available": None}


def test_what_is_missing_comes_with_how_to_get_it() -> None:
    needed = [
        Package("numpy", "1.26"),
        Package("torch", "2.11"),
        Package("rich", "13.7"),
        Package("ray", "2.40", "ray"),
    ]
    gone, old = missing_packages(needed, {"numpy": None, "torch": "2.9.1+cpu", "rich": "15.0.0", "ray": None})
    assert (gone.what, gone.remedy, gone.fatal) == ("numpy is not installed", "pip install numpy", True)
    assert (old.what, old.remedy, old.fatal) == ("torch 2.9.1+cpu is too old", "pip install 'torch>=2.11'", True)
    assert missing_packages(needed[1:2], {"torch": "2.13.0+cpu"}) == []


def test_a_cpu_without_bf16_is_told_of_but_works() -> None:
    [problem] = slow_instruction_sets(["avx2"])
    assert "bf16" in problem.what and not problem.fatal
    assert slow_instruction_sets(["avx512_bf16"]) == []


def test_a_missing_package_makes_the_doctor_fail_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quire.cli.doctor.installed", lambda package: None if package.name == "torch" else "99")
    assert main(["doctor"]) == 1
    assert "PROBLEM: torch is not installed\n  -> pip install torch" in capsys.readouterr().out
