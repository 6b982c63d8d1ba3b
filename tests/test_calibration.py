"""What weights meet over a text, and rounding by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import ConfigError
from quire.models.calibration import WINDOW, calibrate
from quire.models.checkpoint import Checkpoint
from quire.models.gguf.encode import BLOCK, encoded
from quire.models.gguf.search import GRIDS, quantized
from quire.models.gguf.types import decoded
from quire.models.gguf.write import Planned
from quire.models.gptq import LIMITS, rounded
from tests.oracle import VOCAB, load_reference, save_checkpoint


def test_what_weights_meet_is_what_transformers_gives_them(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama")
    text = torch.randint(VOCAB, (WINDOW,), generator=torch.Generator().manual_seed(0)).tolist()
    met = calibrate(Checkpoint(folder), [text], True, lambda done, total: None)
    reference, inputs = load_reference(folder), {}
    for name, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, given, name=name: inputs.update({f"{name}.weight": given[0][0]}))
    with torch.inference_mode():
        reference(torch.tensor([text]))
    assert inputs.keys() <= met.keys()
    for name, x in inputs.items():
        importance, products = met[name].importance, met[name].products
        assert importance is not None and products is not None and met[name].tokens == WINDOW
        torch.testing.assert_close(importance, x.square().mean(0), rtol=1e-3, atol=1e-5 * float(x.square().mean()))
        torch.testing.assert_close(products, x.T @ x, rtol=1e-3, atol=1e-3 * float(x.square().sum(0).max()))


def test_texts_that_say_nothing_are_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama")
    for texts, words in (([[1] * 100], "has 100 tokens, too few"), ([[VOCAB] * WINDOW], f"has the token {VOCAB}")):
        with pytest.raises(ConfigError, match=words):
            calibrate(Checkpoint(folder), texts, False, lambda done, total: None)


@pytest.mark.parametrize("kind", GRIDS)
def test_gptq_rounds_so_that_outputs_err_less(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2048, 32, generator=generator) @ torch.randn(32, 512, generator=generator)
    x = x + 0.5 * torch.randn(2048, 512, generator=generator)  # inputs that go together, as a model's do
    weight, products = torch.randn(48, 512, generator=generator), x.T @ x
    importance = x.square().mean(0)
    block = GRIDS[kind].scheme.block or BLOCK
    parts = rounded(weight, products, importance, block, lambda part, own: quantized(kind, part, own))
    made = torch.cat([part.restored() for part in parts], 1)
    nearest = quantized(kind, weight, importance).restored()
    errors = [((other - weight) @ x.T).norm() for other in (made, nearest)]
    assert errors[0] < 0.8 * errors[1]
    assert LIMITS[kind] == (GRIDS[kind].low, GRIDS[kind].high)

    class Noted:
        pass

    met: Any = Noted()
    met.importance, met.products = importance, products
    form = Planned("x", kind, (48, 512)).form
    assert torch.equal(decoded(form, encoded(kind, weight, met)).restored(), made)
