"""Hugging Face transformers on the cells of `quire bench offline`: a static batch, one JSON line a cell.

usage: run_transformers.py MODEL_DIR [--threads N] [--cells CELL,...]        needs transformers
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from transformers import AutoModelForCausalLM

from quire.bench.cells import CELLS, WARM_UP, Cell, Timing, parse_cells, random_prompts, shape_of


@torch.inference_mode()
def seconds(model, cell: Cell, seed: int) -> float:
    """Time of one run of a cell; the tokens are counted."""
    ids = torch.tensor(random_prompts(cell.batch, cell.prompt, model.config.vocab_size, seed))
    begin = time.perf_counter()
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=cell.output,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    took = time.perf_counter() - begin
    if made.numel() - ids.numel() != cell.batch * cell.output:
        raise RuntimeError(f"{cell.name}: {made.numel() - ids.numel()} tokens, not {cell.batch} x {cell.output}")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cells")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    begin = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    startup = time.perf_counter() - begin
    seconds(model, WARM_UP, 0)
    for cell in parse_cells(args.cells) if args.cells else CELLS:
        first = seconds(model, cell.first, 1)
        timing = Timing(first, seconds(model, cell, 2) if cell.output > 1 else first)
        line = {"engine": "transformers", "startup_s": round(startup, 2), **shape_of(cell)}
        line["prefill_tok_s"] = round(timing.prefill_rate(cell), 1)
        decode = timing.decode_rate(cell)
        if decode is not None:
            line["decode_tok_s"] = round(decode, 1)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
