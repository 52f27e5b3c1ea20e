"""``fp8``: the linear layers of a decoder layer in float8 and bfloat16: products, movements of data, and the whole.

Products are those of the output, of the input's gradient and of the weight's gradient. Movements are what float8 adds:
quantizing and transposing. Their floor is the time of the bytes that they read and write, at the rate of a copy.
"""

import argparse
import dataclasses
import functools
import gc
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedConfig

from benchmarks.cases import DTYPE, Maker
from benchmarks.environment import environment
from benchmarks.records import Writer
from benchmarks.timing import QUICK, Effort, Rates, Step, gpu_ms, peak_mib, wall_ms
from benchmarks.training.arms import parse_numbers
from benchmarks.training.dims import DIMS
from benchmarks.training.train import add_models_argument, number
from liger_ops import silu_mul
from liger_ops.fp8.gated_mlp import gated_rows, gated_rows_backward, scaled_gated_mlp
from liger_ops.fp8.linear import scaled_linear
from liger_ops.fp8.products import Float8Options, scaled_product, unsupported
from liger_ops.fp8.rows import quantize_rows
from liger_ops.fp8.transpose import align, transpose
from liger_ops.fp8.weights import channel_scales, quantize_weights, transpose_weights

BFLOAT16, FLOAT8, FAST = "bfloat16", "float8", "float8, fast accumulation"
KINDS = ("fprop", "dgrad", "wgrad")
"""Products: of the output, the input's gradient and the weight's gradient."""
_LAYERS = {FLOAT8: Float8Options(), FAST: Float8Options(fast_accum=(True, True, True))}


@dataclass(frozen=True)
class Measurement:
    """The time of one part of a layer.

    Attributes:
        model: A name in ``DIMS``.
        kind: ``"product"``, ``"movement"`` or ``"layer"``.
        name: What is measured.
        contender: ``"bfloat16"``, ``"float8"`` or ``"float8, fast accumulation"``, of a layer in all its products.
        ms: Milliseconds of GPU kernels; by the clock without a GPU.
        wall_ms: Of a layer, milliseconds from step to step.
        flops: Of products and layers.
        num_bytes: Of movements, those that are read and written.
        floor_ms: Of movements, the time of these bytes at the rate of a copy; None without a GPU.
        products_ms: Of layers, the sum of the products' times as they were measured one by one.
        peak_mib: Of layers, peak memory beyond inputs and weights.
        error: Of layers in float8, the largest relative distance of an output or gradient from that in bfloat16.
    """

    model: str
    kind: str
    name: str
    contender: str
    ms: float
    wall_ms: float | None = None
    flops: float | None = None
    num_bytes: int | None = None
    floor_ms: float | None = None
    products_ms: float | None = None
    peak_mib: float | None = None
    error: float | None = None

    @property
    def tflop_s(self) -> float | None:
        return self.flops and self.flops / self.ms / 1e9

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


class Timer:
    """Measures steps on one device."""

    def __init__(self, device: torch.device, effort: Effort, copy_rate: float | None) -> None:
        self.device, self.copy_rate = device, copy_rate
        self._effort = effort

    def wall_ms(self, step: Step) -> float:
        repeats = self._effort.repeats(wall_ms([step], 3, self.device)[-1])
        return statistics.median(wall_ms([step], repeats, self.device))

    def ms(self, step: Step) -> float:
        """Milliseconds of GPU kernels, or of the clock without a GPU."""
        if self.device.type != "cuda":
            return self.wall_ms(step)
        repeats = self._effort.repeats(wall_ms([step], 3, self.device)[-1])
        return statistics.median(gpu_ms([step], repeats, self.device))

    def movement(self, model: str, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The measurement of a function that moves its arguments into its results."""
        moved = num_bytes(arguments) + num_bytes(function(*arguments, **options))
        ms = self.ms(lambda: function(*arguments, **options))
        floor = None if self.copy_rate is None else moved / self.copy_rate * 1e3
        return Measurement(model, "movement", name, FLOAT8, ms, num_bytes=moved, floor_ms=floor)


def num_bytes(tensors: Any) -> int:
    """Bytes of tensors in nested tuples and lists."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.itemsize
    return sum(map(num_bytes, tensors)) if isinstance(tensors, tuple | list) else 0


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder layer: of its input, of q, k and v, and between the matrix products of its MLP."""

    hidden: int
    qkv: tuple[int, int, int]
    intermediate: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "Sizes":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        query, value = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        return cls(config.hidden_size, (query, value, value), config.intermediate_size)

    @property
    def linears(self) -> dict[str, tuple[tuple[int, ...], int]]:
        """The rows of the weights of layers that share an input, and that input's size."""
        return {
            "qkv": (self.qkv, self.hidden),
            "o": ((self.hidden,), self.qkv[0]),
            "gate_up": ((self.intermediate, self.intermediate), self.hidden),
            "down": ((self.hidden,), self.intermediate),
        }


@dataclass(frozen=True)
class Linear:
    """Weights of linear layers that share an input, the input and the gradient of their outputs side by side."""

    x: Tensor
    g: Tensor
    weights: list[Tensor]

    @classmethod
    def make(cls, num_rows: Sequence[int], num_columns: int, num_tokens: int, make: Maker) -> "Linear":
        weights = [make.normal(rows, num_columns) * num_columns**-0.5 for rows in num_rows]
        return cls(make.normal(num_tokens, num_columns), make.normal(num_tokens, sum(num_rows)), weights)


def measure_linear(model: str, linear: str, tensors: Linear, timer: Timer) -> Iterator[Measurement]:
    """The products of linear layers that share an input, and what quantizes and transposes their operands."""
    x, g, weights, w = tensors.x, tensors.g, tensors.weights, torch.cat(tensors.weights)
    (x_payload, x_scale), ((w_payload,), w_scale) = quantize_rows(x), quantize_weights(weights, together=True)
    channel_scale = channel_scales(w_scale)
    g_payload, g_scale = quantize_rows(g, channel_scale)
    x_factor, g_factor, scale = align(x_scale, g_scale, channel_scale, x_is_payload=False)
    in_float8: list[tuple[Any, ...]] = [
        (x_payload, w_payload, x_scale, w_scale),
        (g_payload, transpose_weights(weights, channel_scale), g_scale, None),
        (transpose(g_payload, g_factor), transpose(x, x_factor), scale, None),
    ]
    in_bfloat16: list[Step] = [lambda: F.linear(x, w), lambda: g @ w, lambda: g.t() @ x]
    for kind, plain, arguments in zip(KINDS, in_bfloat16, in_float8, strict=True):
        scaled = functools.partial(scaled_product, *arguments, dtype=DTYPE, emulate=False)
        fast_accum = {FLOAT8: False, FAST: True}
        steps = {name: functools.partial(scaled, fast_accum=fast) for name, fast in fast_accum.items()}
        for contender, step in {BFLOAT16: plain, **steps}.items():
            flops = 2.0 * x.shape[0] * w.numel()
            yield Measurement(model, "product", f"{linear} {kind}", contender, timer.ms(step), flops=flops)
    if linear != "down":  # whose input the gated unit quantizes
        yield timer.movement(model, f"{linear}: rows of x", quantize_rows, x)
    if linear != "gate_up":  # whose gradient the gated unit quantizes
        parts = [part.contiguous() for part in g.split([weight.shape[0] for weight in weights], dim=1)]
        yield timer.movement(model, f"{linear}: rows of the gradient", quantize_rows, parts, channel_scale)
    yield timer.movement(model, f"{linear}: x transposed", transpose, x_payload if linear == "down" else x, x_factor)
    yield timer.movement(model, f"{linear}: gradient transposed", transpose, g_payload, g_factor)
    yield timer.movement(model, f"{linear}: rows of weights", quantize_weights, weights)
    yield timer.movement(model, f"{linear}: weights transposed", transpose_weights, weights, channel_scale)
    yield timer.movement(model, f"{linear}: align", align, x_scale, g_scale, channel_scale, x_is_payload=False)


def measure_gated_unit(model: str, sizes: Sizes, num_tokens: int, make: Maker, timer: Timer) -> Iterator[Measurement]:
    """The gated unit between payloads."""
    gate_up, grad = make.normal(num_tokens, 2 * sizes.intermediate), make.normal(num_tokens, sizes.intermediate)
    scale = torch.ones(2 * sizes.intermediate, device=make.device, dtype=torch.bfloat16)
    yield timer.movement(model, "gated unit: forward", gated_rows, gate_up, "silu", False)
    arguments = grad, gate_up, None, scale, "silu", False
    yield timer.movement(model, "gated unit: backward", gated_rows_backward, *arguments, overwrite=True)


def layer_steps(sizes: Sizes, num_tokens: int, make: Maker) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """Steps of all linear layers and the gated unit, forward and backward, which return outputs and gradients."""
    made = {name: Linear.make(rows, columns, num_tokens, make) for name, (rows, columns) in sizes.linears.items()}
    qkv, o, gate_up, down = made.values()
    inputs = [each.x.requires_grad_() for each in (qkv, o, gate_up)]
    weights = [each.requires_grad_() for linear in made.values() for each in linear.weights]
    gradients = [*(each.contiguous() for each in qkv.g.split(sizes.qkv, dim=1)), o.g, down.g]

    def bfloat16() -> list[Tensor]:
        gate, up = (F.linear(gate_up.x, each) for each in gate_up.weights)
        outputs = [F.linear(linear.x, each) for linear in (qkv, o) for each in linear.weights]
        return [*outputs, F.linear(silu_mul(gate, up), down.weights[0])]

    def float8(options: Float8Options) -> list[Tensor]:
        outputs = [each for linear in (qkv, o) for each in scaled_linear(linear.x, linear.weights, options=options)]
        return [*outputs, scaled_gated_mlp(gate_up.x, gate_up.weights, down.weights[0], options=options)]

    def step(forward: Callable[..., list[Tensor]], *arguments: Any) -> tuple[Tensor, ...]:
        outputs = forward(*arguments)
        return (*outputs, *torch.autograd.grad(outputs, [*inputs, *weights], gradients))

    steps: dict[str, Callable[[], tuple[Tensor, ...]]] = {BFLOAT16: lambda: step(bfloat16)}
    for name, options in _LAYERS.items():
        steps[name] = lambda options=options: step(float8, options)
    return steps


def measure_layer(
    model: str, sizes: Sizes, num_tokens: int, make: Maker, timer: Timer, products: Sequence[Measurement]
) -> Iterator[Measurement]:
    """All linear layers and the gated unit, forward and backward."""
    flops = 6.0 * num_tokens * sum(sum(rows) * columns for rows, columns in sizes.linears.values())
    times = {(product.name, product.contender): product.ms for product in products}
    steps = layer_steps(sizes, num_tokens, make)
    truth = [each.clone() for each in steps[BFLOAT16]()]
    for contender, step in steps.items():
        ways, error = [BFLOAT16] * 3, None
        if contender in _LAYERS:
            ways = [FAST if fast else FLOAT8 for fast in _LAYERS[contender].fast_accum]
            error = max(((a - b).norm() / b.norm()).item() for a, b in zip(step(), truth, strict=True))
        parts = [(f"{linear} {kind}", way) for linear in sizes.linears for kind, way in zip(KINDS, ways, strict=True)]
        yield Measurement(
            model=model,
            kind="layer",
            name="all linear layers",
            contender=contender,
            ms=timer.ms(step),
            wall_ms=timer.wall_ms(step),
            flops=flops,
            products_ms=sum(times[part] for part in parts),
            peak_mib=peak_mib(step, timer.device) if timer.device.type == "cuda" else None,
            error=error,
        )


def measure(model: str, num_tokens: int, timer: Timer, tiny: bool) -> Iterator[Measurement]:
    """All measurements of one model."""
    sizes = Sizes.of(DIMS[model].config(1, tiny))
    make = Maker(timer.device)
    products: list[Measurement] = []
    for linear, (rows, columns) in sizes.linears.items():
        tensors = Linear.make(rows, columns, num_tokens, make)
        for one in measure_linear(model, linear, tensors, timer):
            products += [one] if one.kind == "product" else []
            yield one
    yield from measure_gated_unit(model, sizes, num_tokens, make, timer)
    yield from measure_layer(model, sizes, num_tokens, make, timer, products)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models_argument(parser, ["llama3_8b", "qwen3_8b", "llama3_1b"])
    parser.add_argument("--tokens", type=parse_numbers, metavar="N", help="rows of the inputs (default: 16k)")


def run(options: argparse.Namespace, stem: str, console: Console) -> bool:
    """Measures, prints and writes; returns whether this device has float8 products."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if reason := unsupported(device):
        console.print(reason)
        return False
    rates = None if device.type == "cpu" else Rates.measure(device)
    timer = Timer(device, QUICK if options.quick else Effort(milliseconds=100), rates and rates.copy)
    (num_tokens,) = options.tokens or ((48,) if options.quick else (16384,))
    about = environment() | {
        "num_tokens": num_tokens,
        "copy_tb_s": rates and rates.copy / 1e12,
        "matrix_tflop_s": rates and rates.matrix / 1e12,
    }
    with Writer(Path(f"{stem}.jsonl"), about, "fp8") as writer:
        for model in options.model:
            found = []
            for one in measure(model, num_tokens, timer, options.quick):
                writer.write(one)
                found.append(one)
            for table in tables(found, num_tokens):
                console.print(table)
            gc.collect()
    return True


def tables(found: Sequence[Measurement], num_tokens: int) -> Iterator[Table]:
    """The products, movements and whole layers of one model."""
    title = f"{DIMS[found[0].model].title}, one layer, {num_tokens:,} tokens"
    products = [one for one in found if one.kind == "product"]
    header = [cell for contender in (BFLOAT16, FLOAT8, FAST) for cell in (f"{contender}: ms", "TFLOP/s")]
    grid = make_grid(f"{title}: products", "product", *header, "speed")
    for name, group in itertools.groupby(products, lambda one: one.name):
        mine = list(group)
        cells = [cell for one in mine for cell in (f"{one.ms:.3f}", number(one.tflop_s, ",.0f"))]
        grid.add_row(name, *cells, f"{mine[0].ms / mine[1].ms:.2f}x, {mine[0].ms / mine[2].ms:.2f}x")
    yield grid
    grid = make_grid(f"{title}: movements", "movement", "MB", "us", "floor us", "of the floor's rate")
    movements = [one for one in found if one.kind == "movement"]
    for one in movements:
        floor = number(one.floor_ms and one.floor_ms * 1e3, ".1f")
        share = number(one.floor_ms and one.floor_ms / one.ms, ".0%")
        grid.add_row(one.name, f"{one.num_bytes / 1e6:.1f}", f"{one.ms * 1e3:.1f}", floor, share)
    floors = [one.floor_ms for one in movements]
    floor_ms = None if None in floors else sum(floors)
    total_ms = sum(one.ms for one in movements)
    cells = number(floor_ms and floor_ms * 1e3, ".1f"), number(floor_ms and floor_ms / total_ms, ".0%")
    grid.add_row("all", f"{sum(one.num_bytes for one in movements) / 1e6:.1f}", f"{total_ms * 1e3:.1f}", *cells)
    yield grid
    columns = ("ms", "wall ms", "speed", "TFLOP/s", "products ms", "ms beyond them", "peak MiB", "error")
    grid = make_grid(f"{title}: forward and backward of all linear layers and the gated unit", "products in", *columns)
    layers = [one for one in found if one.kind == "layer"]
    for one in layers:
        grid.add_row(
            one.contender,
            f"{one.ms:.3f}",
            number(one.wall_ms, ".3f"),
            f"{layers[0].ms / one.ms:.2f}x",
            number(one.tflop_s, ",.0f"),
            number(one.products_ms, ".3f"),
            number(one.ms - one.products_ms, ".3f"),
            number(one.peak_mib, ",.0f"),
            number(one.error, ".4f"),
        )
    yield grid


def make_grid(title: str, *columns: str) -> Table:
    grid = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        grid.add_column(column, justify="right" if place else "left", no_wrap=not place)
    return grid
