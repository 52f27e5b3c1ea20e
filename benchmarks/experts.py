"""``experts``: a layer of experts, forward and backward, beside transformers' grouped products and liger-kernel's.

All get the same routing. Useful FLOPs are those of the products of pairs of a token and one of its experts, without
what tiles are padded with. Each phase of ours is measured alone too, beside the time of its FLOPs at the rate of one
large product, or of its bytes at the rate of a copy, whichever is longer. ``four_layers`` is a model with attention
and a head, forward and backward: what a layer's speed is worth in a step.
"""

import argparse
import dataclasses
import functools
import gc
import importlib
import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.fabric import Fabric
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.integrations.moe import grouped_mm_experts_forward

from benchmarks.arguments import names
from benchmarks.cases import DTYPE, Maker
from benchmarks.environment import environment
from benchmarks.fp8 import Timer, make_grid
from benchmarks.records import Writer
from benchmarks.timing import QUICK, Effort, Rates, peak_mib
from benchmarks.training.arms import parse_numbers
from benchmarks.training.dims import make_model
from benchmarks.training.train import number
from benchmarks.training.worker import apply_liger_kernel
from liger_ops import backend
from liger_ops.moe import gradients, products, tiles
from liger_ops.moe.experts import moe_experts
from liger_ops.moe.gate import Gate
from liger_ops.moe.index import make_index
from lightning_liger import apply_liger_kernels

OURS, GROUPED, LIGER_KERNEL = "lightning-liger", "transformers", "liger-kernel"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer of experts; ``is_gpt_oss`` for transposed weights, biases and a gate in even features."""

    hidden_size: int
    width: int
    num_experts: int
    top_k: int
    is_gpt_oss: bool = False

    def flops(self, num_tokens: int) -> float:
        """Of forward and backward."""
        return 18.0 * num_tokens * self.top_k * self.hidden_size * self.width


SIZES = {
    "qwen3_30b_a3b": Sizes(2048, 768, 128, 8),
    "mixtral_8x7b": Sizes(4096, 14336, 8, 2),
    "gpt_oss_20b": Sizes(2880, 2880, 32, 4, is_gpt_oss=True),
    "olmoe": Sizes(2048, 1024, 64, 8),
    "deepseek_v3": Sizes(7168, 2048, 256, 8),
    "qwen3_next": Sizes(2048, 512, 512, 10),
}
_TINY = Sizes(32, 16, 4, 2)
FOUR_LAYERS = "four_layers"
_PATCHES: dict[str, Callable[[Any], Any]] = {
    GROUPED: lambda model: None,
    OURS: apply_liger_kernels,
    f"{OURS}, strategy": lambda model: Fabric(strategy="liger", devices=1, precision="bf16-true").setup_module(model),
    LIGER_KERNEL: apply_liger_kernel,
}
"""Each patches a model, and may return one that wraps it."""


@dataclass(frozen=True)
class Measurement:
    """The time of a layer or of a phase of it.

    Attributes:
        model: A name in ``SIZES``.
        num_tokens: Rows of the input.
        routing: The concentration of the Dirichlet distribution that experts' chances are drawn from; None if equal.
        kind: ``"layer"``, ``"phase"`` or ``"model"``.
        name: Of the contender, or of the phase.
        ms: Milliseconds of GPU kernels; by the clock without a GPU.
        flops: Useful ones.
        floor_ms: Of phases, see the module.
        kept_mib: Memory between forward and backward beyond inputs and weights.
        peak_mib: Peak memory beyond inputs and weights, gradients included.
        error: Of layers, the largest relative distance of an output or gradient from transformers'.
    """

    model: str
    num_tokens: int
    routing: float | None
    kind: str
    name: str
    ms: float
    flops: float | None = None
    floor_ms: float | None = None
    kept_mib: float | None = None
    peak_mib: float | None = None
    error: float | None = None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


class Layer:
    """Inputs, weights and functions of one layer."""

    def __init__(self, sizes: Sizes, num_tokens: int, routing: float | None, make: Maker) -> None:
        self.sizes = sizes
        generator = torch.Generator().manual_seed(0)
        chances = torch.ones(sizes.num_experts)
        if routing is not None:
            torch.manual_seed(0)
            chances = torch.distributions.Dirichlet(routing * chances).sample() + 1e-6
        index = torch.multinomial(chances.expand(num_tokens, -1), sizes.top_k, generator=generator)
        self.index = index.to(make.device)
        self.scores = make.normal(num_tokens, sizes.top_k).softmax(-1).detach().requires_grad_()
        self.x = make.leaf(num_tokens, sizes.hidden_size)
        self.grad = make.normal(num_tokens, sizes.hidden_size)
        shapes = (2 * sizes.width, sizes.hidden_size), (sizes.hidden_size, sizes.width)
        self.weights = [
            (make.normal(sizes.num_experts, *(shape[::-1] if sizes.is_gpt_oss else shape)) * shape[1] ** -0.5)
            .detach()
            .requires_grad_()
            for shape in shapes
        ]
        self.biases = [make.leaf(sizes.num_experts, shape[0]) for shape in shapes] if sizes.is_gpt_oss else []

    def gate(self) -> Gate:
        return Gate("silu", 7.0, 1.702, 1.0) if self.sizes.is_gpt_oss else Gate()

    def ours(self) -> Tensor:
        options = self.gate()._asdict()
        if self.biases:
            options |= {"gate_up_bias": self.biases[0], "down_bias": self.biases[1]}
            options |= {"interleaved": True, "transposed": True}
        return moe_experts(self.x, *self.weights, self.index, self.scores, **options)

    def grouped(self) -> Tensor:
        def apply_gate(z: Tensor) -> Tensor:
            if not self.sizes.is_gpt_oss:
                gate, up = z.chunk(2, dim=-1)
                return torch.nn.functional.silu(gate) * up
            gate, up = z[..., ::2].clamp(max=7.0), z[..., 1::2].clamp(-7.0, 7.0)
            return gate * torch.sigmoid(gate * 1.702) * (up + 1)

        module: Any = SimpleNamespace(
            num_experts=self.sizes.num_experts, has_gate=True, has_bias=bool(self.biases),
            has_post_expert_norm=False, is_transposed=self.sizes.is_gpt_oss, _is_expert_parallel=False,
            _apply_gate=apply_gate, gate_up_proj=self.weights[0], down_proj=self.weights[1],
        )  # fmt: skip
        if self.biases:
            module.gate_up_proj_bias, module.down_proj_bias = self.biases
        return grouped_mm_experts_forward(module, self.x, self.index, self.scores)

    def contenders(self) -> dict[str, Callable[[], Tensor]]:
        """What is compared; liger-kernel's, which takes minutes to tune itself, at the end."""
        found = {GROUPED: self.grouped, OURS: self.ours}
        if not self.biases and self.x.is_cuda:
            try:
                module = importlib.import_module("liger_kernel.ops.fused_moe")
            except ImportError:
                return found
            function, index = module.LigerFusedMoEFunction, self.index.int()
            found[LIGER_KERNEL] = lambda: function.apply(self.x, *self.weights, index, self.scores)
        return found

    def step(self, forward: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        y = forward()
        leaves = (self.x, *self.weights, self.scores, *self.biases)
        return (y, *torch.autograd.grad(y, leaves, self.grad))


def _distance(actual: Tensor, expected: Tensor) -> float:
    """Relative to the expected one's norm; in parts, as gradients of weights are large."""
    pairs = zip(actual.detach().flatten().split(2**26), expected.detach().flatten().split(2**26), strict=True)
    squares = [((a.float() - b.float()).square().sum(), b.float().square().sum()) for a, b in pairs]
    error, total = (sum(each) for each in zip(*squares, strict=True))
    return float(error / total) ** 0.5


def measure_layer(name: str, layer: Layer, routing: float | None, timer: Timer) -> Iterator[Measurement]:
    """The whole layer by each contender."""
    num_tokens = layer.x.shape[0]
    truth = layer.step(layer.grouped)
    for contender, forward in layer.contenders().items():
        step = functools.partial(layer.step, forward)
        found = step()
        error = max(map(_distance, found, truth))
        del found
        kept = peak = None
        if layer.x.is_cuda:
            before = torch.cuda.memory_allocated()
            y = forward()
            kept = (torch.cuda.memory_allocated() - before) / 2**20
            del y
            peak = peak_mib(step, timer.device)
        yield Measurement(
            name, num_tokens, routing, "layer", contender, timer.ms(step), layer.sizes.flops(num_tokens),
            kept_mib=kept, peak_mib=peak, error=error,
        )  # fmt: skip


def measure_phases(name: str, layer: Layer, routing: float | None, timer: Timer, rates: Rates) -> Iterator[Measurement]:
    """The parts of ours, one by one."""
    sizes, gate, x = layer.sizes, layer.gate(), layer.x.detach()
    num_tokens, top_k = layer.index.shape
    num_pairs, gated = num_tokens * top_k, 2 if sizes.is_gpt_oss else 1
    gate_up, down = (each.detach().mT if sizes.is_gpt_oss else each.detach() for each in layer.weights)
    rows = tiles.choose_rows(num_pairs, sizes.num_experts, DTYPE)
    index = make_index(layer.index.reshape(-1), sizes.num_experts, rows)
    scores, grad = layer.scores.detach(), layer.grad
    z, a, y = (x.new_empty((num_pairs, size)) for size in (2 * sizes.width, sizes.width, sizes.hidden_size))
    out, grad_scores = torch.empty_like(x), torch.empty_like(scores)
    grad_z = torch.empty_like(z)
    grads = [each.new_empty(each.shape) for each in layer.weights]
    pair = 2.0 * num_pairs * sizes.width * sizes.hidden_size
    transposed = sizes.is_gpt_oss
    phases: dict[str, tuple[float, tuple[Any, ...], Callable[[], Any]]] = {
        "index": (0, (), lambda: make_index(layer.index.reshape(-1), sizes.num_experts, rows)),
        "gate and up": (
            2 * pair,
            (x, gate_up, z, a),
            lambda: products.gate_up(x, gate_up, None, index, top_k, rows, gate, gated, z, a),
        ),
        "down": (pair, (a, down, y), lambda: products.product(a, down, None, index, rows, y)),
        "sum of rows": (0, (y, out), lambda: products.combine(y, scores, index, top_k, out)),
        "gradient of z": (
            pair,
            (grad, down, z, grad_z, a),
            lambda: gradients.gate_backward(grad, down.mT, z, scores, index, rows, gate, gated, grad_z, a, grad_scores),
        ),
        "gradient of down": (
            pair,
            (a, grad, grads[1]),
            lambda: gradients.weight_gradient(
                *((a, grad) if transposed else (grad, a)), index, top_k, not transposed, grads[1]
            ),
        ),
        "gradient of rows": (
            2 * pair,
            (grad_z, gate_up, y),
            lambda: products.product(grad_z, gate_up.mT, None, index, rows, y),
        ),
        "gradient of gate and up": (
            2 * pair,
            (grad_z, x, grads[0]),
            lambda: gradients.weight_gradient(
                *((x, grad_z) if transposed else (grad_z, x)), index, top_k, transposed, grads[0]
            ),
        ),
    }
    for phase, (flops, moved, run) in phases.items():
        num_bytes = sum(each.numel() * each.itemsize for each in moved)
        floor = max(flops / rates.matrix, num_bytes / rates.copy) * 1e3
        yield Measurement(name, num_tokens, routing, "phase", phase, timer.ms(run), flops or None, floor_ms=floor)


def measure_model(arm: str, quick: bool, device: torch.device) -> Measurement | None:
    """Four layers of the widths of Qwen3-30B-A3B and a head of 32,768 words, on four sequences of 2,048 tokens."""
    config = Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, vocab_size=32768, num_hidden_layers=4, use_cache=False,
    )  # fmt: skip
    if quick:
        config.update({"hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2})
        config.update({"head_dim": 8, "vocab_size": 99})
    model = make_model(config, device, DTYPE)
    try:
        patched = _PATCHES[arm](model)
    except ImportError:
        return None
    run = patched if isinstance(patched, torch.nn.Module) else model
    ids = torch.randint(config.vocab_size, (2, 8) if quick else (4, 2048), device=device)

    def forward() -> Tensor:
        return run(input_ids=ids, labels=ids).loss

    def step() -> None:
        forward().backward()
        model.zero_grad()

    step()
    kept = peak = None
    if device.type == "cuda":
        gc.collect()
        before = torch.cuda.memory_allocated()
        loss = forward()
        kept = (torch.cuda.memory_allocated() - before) / 2**20
        del loss
        peak = peak_mib(step, device)
    timer = Timer(device, QUICK if quick else Effort(milliseconds=500), None)
    return Measurement(FOUR_LAYERS, ids.numel(), None, "model", arm, timer.ms(step), kept_mib=kept, peak_mib=peak)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    every = *SIZES, FOUR_LAYERS
    parser.add_argument(
        "--model", type=names("model", every), default=every, metavar="MODEL,...",
        help=f"which sizes (default: all): {', '.join(every)}",
    )  # fmt: skip
    parser.add_argument("--tokens", type=parse_numbers, metavar="N,...", help="rows of the input (default: 8k)")
    parser.add_argument(
        "--routing", type=float, metavar="A",
        help="draw the experts' chances from a Dirichlet distribution of this concentration (default: equal chances)",
    )  # fmt: skip


def run(options: argparse.Namespace, stem: str, console: Console) -> bool:
    """Measures, prints and writes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rates = None if device.type == "cpu" else Rates.measure(device)
    timer = Timer(device, QUICK if options.quick else Effort(milliseconds=100), rates and rates.copy)
    about = environment() | {
        "copy_tb_s": rates and rates.copy / 1e12,
        "matrix_tflop_s": rates and rates.matrix / 1e12,
    }
    with Writer(Path(f"{stem}.jsonl"), about, "experts") as writer:

        def keep(found: Iterator[Measurement]) -> list[Measurement]:
            kept = []
            for one in found:  # written at once, as the next one may take long
                writer.write(one)
                kept.append(one)
            return kept

        for name in options.model:
            if name == FOUR_LAYERS:
                console.print(*tables(keep(measure_models(options.quick, device))))
                continue
            for num_tokens in options.tokens or ((33,) if options.quick else (8192,)):
                sizes = _TINY if options.quick else SIZES[name]
                layer = Layer(sizes, num_tokens, options.routing, Maker(device))
                found = []
                if rates is not None and backend.use_triton(layer.x):
                    found += keep(measure_phases(name, layer, options.routing, timer, rates))
                found += keep(measure_layer(name, layer, options.routing, timer))
                for table in tables(found):
                    console.print(table)
                del layer
                gc.collect()
    return True


def measure_models(quick: bool, device: torch.device) -> Iterator[Measurement]:
    """Of each arm, in a process of its own: liger-kernel's changes are for every model of the process."""
    for arm in _PATCHES:
        with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as process:
            found = process.submit(measure_model, arm, quick, device).result()
        if found is not None:
            yield found


def tables(found: list[Measurement]) -> Iterator[Table]:
    """The layer and its phases."""
    title = f"{found[0].model}, {found[0].num_tokens:,} tokens"
    title += "" if found[0].routing is None else f", Dirichlet {found[0].routing:g}"
    grid = make_grid(f"{title}: forward and backward", "experts", "ms", "TFLOP/s", "kept MiB", "peak MiB", "distance")
    for one in found:
        if one.kind != "phase":
            rate = one.flops and one.flops / one.ms / 1e9
            numbers = number(rate, ",.0f"), number(one.kept_mib, ",.0f"), number(one.peak_mib, ",.0f")
            grid.add_row(one.name, f"{one.ms:.3f}", *numbers, number(one.error, ".4f"))
    yield grid
    phases = [one for one in found if one.kind == "phase"]
    if phases:
        grid = make_grid(f"{title}: phases", "phase", "ms", "TFLOP/s", "floor ms", "of the floor's rate")
        for one in phases:
            rate = one.flops and one.flops / one.ms / 1e9
            share = number(one.floor_ms and one.floor_ms / one.ms, ".0%")
            grid.add_row(one.name, f"{one.ms:.3f}", number(rate, ",.0f"), number(one.floor_ms, ".3f"), share)
        yield grid
