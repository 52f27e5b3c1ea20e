"""``activations``: bytes that a layer keeps for each token between forward and backward, and the time of a step."""

import argparse
import dataclasses
import gc
import json
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.environment import environment
from benchmarks.records import Writer
from benchmarks.timing import wall_ms
from benchmarks.training.dims import DIMS, make_model
from benchmarks.training.train import add_models_argument, number

MODELS = ("llama3_8b", "qwen3_8b", "gemma_7b", "mistral_7b", "phi3_mini")
CONTENDERS = ("eager", "liger_kernel", "store", "cheap")
TITLES = {
    "eager": "Hugging Face",
    "liger_kernel": "liger-kernel",
    "store": "lightning-liger, all stored",
    "cheap": "lightning-liger",
}
_DEPTHS = 2, 4


@dataclass(frozen=True)
class Kept:
    """One contender's layers of one model.

    Attributes:
        model, contender: Names in ``DIMS`` and ``CONTENDERS``.
        tokens: In the batch.
        bytes_per_token: That one layer keeps for each token, from two depths, without parameters.
        step_ms: Forward and backward of the deeper model without its head, None on a CPU.
        error: Why there is no result.
    """

    model: str
    contender: str
    tokens: int
    bytes_per_token: float | None = None
    step_ms: float | None = None
    error: str | None = None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models_argument(parser, MODELS)
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="sequences (default: 8)")
    parser.add_argument("--sequence-length", type=int, default=2048, metavar="N", help="their tokens (default: 2048)")


def _apply(contender: str, model: nn.Module) -> Any:
    """Applies a contender; returns the controlled layers of ours."""
    if contender == "eager":
        return None
    if contender == "liger_kernel":
        from benchmarks.training.worker import apply_liger_kernel

        apply_liger_kernel(model)
        return None
    from lightning_liger import apply_liger_kernels
    from lightning_liger.activations.layers import control_layers

    apply_liger_kernels(model)
    layers = control_layers(model)
    if layers is None:
        raise ValueError("no layers were found")
    _set_modes(layers, contender)
    return layers


def _set_modes(layers: Any, mode: str) -> None:
    for index in range(len(layers.layers)):
        layers.modes[index] = mode


def _bytes_in_hooks(forward: Callable[[], Tensor], model: nn.Module, ids: Tensor) -> int:
    """Bytes of the distinct storages that a forward saves for backward, without parameters and inputs."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), ids)}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage  # kept alive, so that no other one gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in found.values())


def _count(forward: Callable[[], Tensor], model: nn.Module, ids: Tensor, layers: Any) -> int:
    """Bytes that a forward keeps, without a GPU."""
    if layers is None or layers.modes[0] == "store":
        return _bytes_in_hooks(forward, model, ids)
    # These hooks do not see what the layers' own hooks keep.
    _set_modes(layers, "store")
    stored = _bytes_in_hooks(forward, model, ids)
    _set_modes(layers, "cheap")
    forward()
    return stored - sum(each.cheap for each in layers.sizes)


def measure(name: str, contender: str, batch_size: int, sequence_length: int, tiny: bool) -> Kept:
    """Measures two depths of a model on the GPU, or counts saved tensors on a CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = batch_size * sequence_length
    kept: dict[int, int] = {}
    step_ms = None
    for depth in _DEPTHS:
        config = DIMS[name].config(depth, tiny)
        model = make_model(config, device, torch.bfloat16)
        layers = _apply(contender, model)
        ids = torch.randint(3, config.vocab_size, (batch_size, sequence_length), device=device)

        def forward(model: nn.Module = model, ids: Tensor = ids) -> Tensor:
            return model.base_model(input_ids=ids).last_hidden_state

        def step(forward: Callable[[], Tensor] = forward, model: nn.Module = model) -> None:
            hidden = forward()
            hidden.backward(torch.ones_like(hidden))
            model.zero_grad()

        step()  # compiles, and settles the allocator
        if device.type == "cuda":
            gc.collect()
            before = torch.cuda.memory_allocated()
            hidden = forward()
            kept[depth] = torch.cuda.memory_allocated() - before
            del hidden
            if depth == max(_DEPTHS):
                wall_ms([step], 2, device)
                step_ms = statistics.median(wall_ms([step], 7, device))
        else:
            kept[depth] = _count(forward, model, ids, layers)
        del model, layers, forward, step
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    few, many = _DEPTHS
    return Kept(name, contender, tokens, (kept[many] - kept[few]) / (many - few) / tokens, step_ms)


def _measure_or_say(name: str, contender: str, *sizes: Any) -> Kept:
    try:
        return measure(name, contender, *sizes)
    except Exception as error:  # a row of the results, for the other contenders go on
        text = (str(error).strip().splitlines() or [""])[0]
        return Kept(name, contender, sizes[0] * sizes[1], error=f"{type(error).__name__}: {text}"[:300])


def run(options: argparse.Namespace, stem: str, console: Console) -> bool:
    """Measures, prints and writes; returns whether all of ours ran."""
    sizes = (2, 16, True) if options.quick else (options.batch_size, options.sequence_length, False)
    found: list[Kept] = []
    with Writer(Path(f"{stem}.jsonl"), environment(), "activations") as writer:
        for contender in CONTENDERS:
            if options.quick:
                results = [_measure_or_say(name, contender, *sizes) for name in options.model]
            else:  # in one process for all models, but liger-kernel's changes must not outlast it
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                    jobs = [process.submit(_measure_or_say, name, contender, *sizes) for name in options.model]
                    results = [job.result() for job in jobs]
            for result in results:
                writer.write(result)
                found.append(result)
                if result.error:
                    console.print(f"{result.model}, {contender}: failed ({result.error})")
    console.print(table(found))
    return all(result.error is None for result in found if result.contender in ("store", "cheap"))


def read_lines(lines: Sequence[dict[str, Any]]) -> list[Kept]:
    """The measurements in a file of results."""
    return [Kept(**line) for line in lines]


def table(found: Sequence[Kept]) -> Table:
    """Bytes and milliseconds of each contender."""
    grid = Table(
        title="Bytes that a layer keeps for each token between forward and backward / ms of a step of"
        f" {max(_DEPTHS)} layers, {found[0].tokens:,} tokens",
        title_justify="left",
    )
    grid.add_column("model")
    for contender in CONTENDERS:
        grid.add_column(TITLES[contender], justify="right")
    grid.add_column("relative to all stored", justify="right")
    for name in dict.fromkeys(result.model for result in found):
        grid.add_row(*cells(name, found))
    return grid


def cells(name: str, found: Sequence[Kept]) -> list[str]:
    """The cells of one model's row."""
    by_name = {result.contender: result for result in found if result.model == name}
    row = [DIMS[name].title]
    for contender in CONTENDERS:
        result = by_name.get(contender, Kept(name, contender, 0))
        time = "" if result.step_ms is None else f" / {result.step_ms:.1f}"
        row.append(number(result.bytes_per_token, ",.0f") + time)
    stored, cheap = (by_name[key].bytes_per_token if key in by_name else None for key in ("store", "cheap"))
    row.append("-" if not stored or cheap is None else f"{cheap / stored:.2f}")
    return row
