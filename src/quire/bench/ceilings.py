"""The least time that a cell could take on this machine: a roofline model (https://doi.org/10.1145/1498765.1498785).

A step reads its weights and its requests' keys and values at least once, and does at least the model's
multiplications. So it takes at least its bytes divided by the memory bandwidth, and at least its operations divided by
the matrix throughput. A quantized model's products use 8-bit integers, whose throughput is measured separately;
attention uses the model's data type. Everything is measured in this process, with the engine's number of threads. A
model small enough to fit into the processor's caches can exceed the memory bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from quire.bench.cells import Cell, Timing, shape_of
from quire.layers.mamba import MambaConfig
from quire.models.model import ModelSizes
from quire.ops.memory import huge
from quire.ops.states import TILE, StateShape

if TYPE_CHECKING:
    from quire.llm import LLM

READ_BYTES = 512 * 2**20
"""Far larger than any cache."""

SQUARE = 2048
"""Rows and columns of the matrices: large enough for full throughput, small enough for a quick measurement."""

INT8_SQUARE = 1024
"""The same for 8-bit integers, whose products are faster."""

MOST_SECONDS = 2.0
"""After which no more calls of one product are timed."""

GPU_COPY_BYTES, GPU_SQUARE = 4 * 2**30, 8192
"""The same on a GPU, where a copy's reads and writes both count."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine's peak rates with `threads` threads, in bytes and operations per second.

    A multiply-add is two operations. `matrix_rate` is for the model's data type. A GPU has no threads.
    """

    threads: int
    read_rate: float
    matrix_rate: float
    int8_rate: float


def measure_machine(dtype: torch.dtype, threads: int, repeat: int = 7, device: torch.device | str = "cpu") -> Machine:
    """Measure the read rate of a long sum, and matrix products in `dtype` and int8: each the best of `repeat`.

    The int8 rate is at least that of `dtype`, whose product could be used instead. On a GPU, a copy is measured instead
    of a sum.
    """
    if torch.device(device).type == "cuda":
        return _measure_gpu(dtype, repeat, torch.device(device))
    torch.set_num_threads(threads)
    big = huge(READ_BYTES).view(torch.float32).fill_(1.0)
    read = READ_BYTES / _best(big.sum, repeat)
    x, weight = (torch.randn(SQUARE, SQUARE).to(dtype) for _ in range(2))
    matrix = 2 * SQUARE**3 / _best(lambda: torch.nn.functional.linear(x, weight), repeat)
    return Machine(threads, read, matrix, max(matrix, _int8_rate(2 * repeat, INT8_SQUARE)))


def _measure_gpu(dtype: torch.dtype, repeat: int, device: torch.device) -> Machine:
    def finished(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            call()
            torch.cuda.synchronize(device)

        return run

    read = _gpu_copy_rate(device, repeat, finished)
    x, weight = (torch.randn(GPU_SQUARE, GPU_SQUARE, device=device).to(dtype) for _ in range(2))
    matrix = 2 * GPU_SQUARE**3 / _best(finished(lambda: torch.nn.functional.linear(x, weight)), repeat)
    return Machine(0, read, matrix, max(matrix, _int8_rate(repeat, GPU_SQUARE, device, finished)))


def _gpu_copy_rate(
    device: torch.device, repeat: int, finished: Callable[[Callable[[], object]], Callable[[], object]]
) -> float:
    """Bytes read and written per second; the memory is freed afterwards."""
    size = min(
        GPU_COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 4
    )  # both copies must fit into what the engine left
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / _best(finished(lambda: target.copy_(source)), repeat)


def _int8_rate(
    repeat: int,
    square: int,
    device: torch.device | str = "cpu",
    finished: Callable[[Callable[[], object]], Callable[[], object]] = lambda call: call,
) -> float:
    """Rate of a product of 8-bit integers with sums of 32 bits; 0 where torch (whose private API it is) has none."""
    x, weight = (torch.randint(-127, 128, (square, square), dtype=torch.int8, device=device) for _ in range(2))
    try:
        return 2 * square**3 / _best(finished(lambda: torch._int_mm(x, weight)), repeat)
    except (AttributeError, RuntimeError):
        return 0.0


def _best(call: Callable[[], object], repeat: int) -> float:
    """Seconds of the fastest of `repeat` calls, after a warm-up call; of fewer once they have taken `MOST_SECONDS`, as
    where torch has no fast kernel for this processor."""
    call()
    times: list[float] = []
    while len(times) < repeat and sum(times) < MOST_SECONDS:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


class Cost(NamedTuple):
    """A step's least cost: bytes read, and operations of products with weights and of attention."""

    num_bytes: int
    products: int
    attention: int


@dataclass(frozen=True, slots=True)
class Work:
    """A model's cost parameters.

    Attributes:
        weight_bytes: bytes of weights that a step of many tokens reads.
        body_parameters: parameters that each token is multiplied with.
        head_parameters: parameters that each sampled token's row is multiplied with.
        kv_bytes: bytes of one token's keys and values in one layer.
        attention_ops: operations for one token attending to one other in one layer (latent attention: in the absorbed
            form).
        windows: for each layer with attention, its window in tokens; None if it sees all.
        int8_products: products with weights use 8-bit integers.
        expert_bytes: the part of `weight_bytes` that is in routed experts.
        expert_share: the share of a layer's experts that one token is routed to.
        state_bytes: average bytes that recurrent layers read and write per decoded token.
        state_ops: their operations per token, besides products with weights.
    """

    weight_bytes: int
    body_parameters: int
    head_parameters: int
    kv_bytes: int
    attention_ops: int
    windows: tuple[int | None, ...]
    int8_products: bool = False
    expert_bytes: int = 0
    expert_share: float = 1.0
    state_bytes: int = 0
    state_ops: int = 0

    @classmethod
    def of(cls, model: ModelSizes, kv_bytes_per_token: int) -> Work:
        """The cost parameters of a loaded model whose cache takes this many bytes per token over all layers."""
        config = model.config
        table = config.vocab_size * config.layer.hidden_size
        tables = table if config.tie_word_embeddings else 2 * table
        others = [index for index in range(model.num_layers) if index not in config.recurrent_layers]
        attending = [index for index in others if config.layer_at(index).attends]
        width = model.attention_width
        if config.layer.latent is None:
            width = sum(2 * config.layer_at(index).head_dim for index in attending) // len(attending)
        state_bytes, state_ops = _of_states(model)
        return cls(
            weight_bytes=model.weight_bytes,
            body_parameters=model.active_parameters - tables,
            head_parameters=table,
            kv_bytes=kv_bytes_per_token // len(attending),
            attention_ops=2 * config.layer.num_heads * width,
            windows=tuple(model.windows[index] for index in attending),
            int8_products=model.multiplies_bytes,
            expert_bytes=model.expert_bytes,
            expert_share=config.routing.top_k / config.routing.num_experts if config.routing else 1.0,
            state_bytes=state_bytes,
            state_ops=state_ops,
        )

    def weights_read(self, tokens: int) -> int:
        """Bytes of weights that a step of this many tokens reads, if each chooses its experts at random.

        An expert is then chosen by none of them with probability (1 - `expert_share`) ** `tokens`.
        """
        return self.weight_bytes - round(self.expert_bytes * (1.0 - self.expert_share) ** tokens)

    def seen(self, context: int) -> int:
        """Number of tokens that the last of `context` tokens attends to, including itself, summed over the layers."""
        return sum(context if window is None else min(context, window) for window in self.windows)

    def step(self, batch: int, context: int) -> Cost:
        """The cost of a step that decodes one token for each of `batch` requests."""
        seen = batch * self.seen(context)
        products = 2 * batch * (self.body_parameters + self.head_parameters)
        num_bytes = self.weights_read(batch) + seen * self.kv_bytes + batch * self.state_bytes
        return Cost(num_bytes, products, seen * self.attention_ops + batch * self.state_ops)

    def prompts(self, batch: int, prompt: int) -> Cost:
        """The cost of computing `batch` whole prompts, with one sampled token each, in one step."""
        products = 2 * batch * (prompt * self.body_parameters + self.head_parameters)
        seen = batch * sum(self.seen(context) for context in range(1, prompt + 1))
        num_bytes = self.weights_read(batch * prompt) + batch * (self.seen(prompt) * self.kv_bytes + self.state_bytes)
        return Cost(num_bytes, products, seen * self.attention_ops + batch * prompt * self.state_ops)


def _of_states(model: ModelSizes) -> tuple[int, int]:
    """Bytes and operations of a token in all recurrent layers (see `of_state`), without short convolutions."""
    shapes = [shape for shape in model.kv_shapes() if isinstance(shape, StateShape)]
    vectors = 1 if isinstance(model.config.recurrent, MambaConfig) else 2
    works = [(shape.layers, *of_state(shape, vectors)) for shape in shapes]
    return sum(each * size for each, size, _ in works), sum(each * operations for each, _, operations in works)


def of_state(shape: StateShape, vectors: int) -> tuple[int, int]:
    """Average bytes that one layer reads and writes per decoded token, and operations per token.

    A decoded token reads a state, the rows of its tile (half of them on average) and the convolution's weights; the
    last token of a tile writes a state. Each token is multiplied with a state and added to one, and interacts with half
    of its tile's other tokens on average.

    Args:
        vectors: number of a token's vectors that states and rows are multiplied with: 2 for the delta rule, 1 in
            Mamba 2.
    """
    numbers, rows = shape.heads * shape.key_dim * shape.value_dim, (TILE - 1) / 2
    row = shape.key_heads * shape.key_dim + shape.heads * (shape.value_dim + shape.decay_dim)
    num_bytes = 4 * (numbers * (1 + 1 / TILE) + rows * row + shape.taps * shape.channels)
    in_tile = 2 * vectors * shape.heads * rows * (shape.key_dim + shape.value_dim)
    return round(num_bytes), round(2 * (vectors + 1) * numbers + in_tile)


def work_of(llm: LLM) -> Work:
    """The cost parameters of an engine's model, with its cache as it is stored."""
    return Work.of(llm.model, llm.memory_plan.kv_bytes_per_token)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """A model's least times on a machine."""

    work: Work
    machine: Machine

    def seconds(self, cost: Cost) -> float:
        """Least time of a step, in seconds."""
        return max(self._reading(cost), self._computing(cost))

    def _reading(self, cost: Cost) -> float:
        return cost.num_bytes / self.machine.read_rate

    def _computing(self, cost: Cost) -> float:
        machine = self.machine
        rate = machine.int8_rate if self.work.int8_products else machine.matrix_rate
        return cost.products / rate + cost.attention / machine.matrix_rate

    def prefill_seconds(self, cell: Cell) -> float:
        """Least time of the run with one token per request."""
        return self.seconds(self.work.prompts(cell.batch, cell.prompt))

    def decode_seconds(self, cell: Cell) -> float:
        """Least time of the steps after the first token: step k attends to the prompt and k tokens."""
        return sum(self.seconds(self.work.step(cell.batch, cell.prompt + k)) for k in range(1, cell.output))

    def prefill_bound(self, cell: Cell) -> str:
        """Which rate limits the run with one token per request: "memory" or "compute"."""
        return self._bound(self.work.prompts(cell.batch, cell.prompt))

    def decode_bound(self, cell: Cell) -> str:
        """Which rate limits the last decode step."""
        return self._bound(self.work.step(cell.batch, cell.prompt + cell.output - 1))

    def _bound(self, cost: Cost) -> str:
        return "memory" if self._reading(cost) >= self._computing(cost) else "compute"

    def why_above(self, bound: str) -> str:
        """Why a cell that this rate limits may be above its ceiling, for display."""
        slow = "or the machine was slower while it was measured"
        if bound == "compute":
            return f"the ceiling is the rate of torch's matrix product, which is not the fastest one, {slow}"
        read = self.work.weight_bytes
        if read <= READ_BYTES:
            return (
                f"the ceiling is the rate of memory, and weights of {read / 2**20:,.0f} MiB may stay in caches, {slow}"
            )
        return "the machine was slower while the rate of its memory was measured; repeat it on an idle machine"


def record(cell: Cell, timing: Timing, ceilings: Ceilings) -> dict[str, Any]:
    """A cell's result for its JSON line: rates in tokens per second, and shares of the ceiling, usually from 0 to 1;
    "above_ceiling" says why one may be larger.
    """
    prefill, decode = timing.prefill_rate(cell), timing.decode_rate(cell)
    least_prefill, least_decode = ceilings.prefill_seconds(cell), ceilings.decode_seconds(cell)
    line: dict[str, Any] = shape_of(cell) | {
        "prefill_tok_s": round(prefill, 1),
        "prefill_share": round(least_prefill / timing.first, 4),
        "total_s": round(timing.total, 4),
    }
    if decode is not None:
        line |= {
            "decode_tok_s": round(decode, 1),
            "decode_share": round(least_decode / (timing.total - timing.first), 4),
            "decode_bound": ceilings.decode_bound(cell),
        }
    bounds = {"prefill": ceilings.prefill_bound(cell), "decode": ceilings.decode_bound(cell)}
    above = {name: ceilings.why_above(bound) for name, bound in bounds.items() if line.get(f"{name}_share", 0) > 1}
    return line | ({"above_ceiling": above} if above else {})
