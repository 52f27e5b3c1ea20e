"""``examples``: the recipes of ``examples/`` on a GPU, with the dimensions of Llama 3.2 1B.

Each example trains a few steps: the yaml files through the command line, the Fabric loop by its functions. That shows
that it runs at a real size, and how fast and in how much memory. Those on the small files in ``examples/data`` have
short sequences, so their speed is not that of a real run; those on text have rows of 2048 tokens, or of 32,768.

All run in one process, one after the other, so that imports, CUDA and compiled kernels are paid for once. A failed
example, and one that leaves memory on the GPU, ends the process, and the next one begins in a new one. The example for
several nodes runs in two processes of this machine, each of which sees one GPU and takes itself for a node.
"""

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.arguments import names
from benchmarks.environment import environment
from benchmarks.records import Line, Writer
from benchmarks.training.dims import DIMS
from benchmarks.training.processes import free_port
from benchmarks.training.train import number

ROOT = Path(__file__).parents[2]
_KEPT = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_KEPT += ("head_dim", "vocab_size", "tie_word_embeddings")
# CLIP ViT-L/14 for images of 336 pixels, as in LLaVA 1.5: 576 tokens of an image.
_VISION = {"image_size": 336, "patch_size": 14, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
_VISION |= {"num_attention_heads": 16}
_LONG = 32_768


def _sizes() -> dict[str, Any]:
    sizes = DIMS["llama3_1b"].config().to_dict()
    return {key: sizes[key] for key in _KEPT if key in sizes}


def _with_config(*groups: str, **changes: Any) -> dict[str, Any]:
    return {f"model.{group}.{key}": value for group in groups for key, value in (_sizes() | changes).items()}


def _plain() -> dict[str, Any]:
    sizes = _sizes()
    renamed = {"num_layers": sizes["num_hidden_layers"], "num_heads": sizes["num_attention_heads"]}
    own = {key: sizes[key] for key in ("vocab_size", "hidden_size", "intermediate_size")}
    return {f"model.{key}": value for key, value in (own | renamed).items()}


def _text(block_size: int, batch_size: int) -> dict[str, Any]:
    """Rows of Python's standard library."""
    settings = {"path": None, "vocab_size": 16384, "max_documents": 150, "block_size": block_size}
    return {f"data.{key}": value for key, value in {**settings, "batch_size": batch_size}.items()}


def _images() -> dict[str, Any]:
    tokens = (_VISION["image_size"] // _VISION["patch_size"]) ** 2
    processor = {"tokenizer": "examples/data/tokenizer", "image_size": _VISION["image_size"]}
    text = {"model_type": "llama", "max_position_embeddings": 8192, "pad_token_id": 0, **_sizes()}
    return {
        "model.config.text_config": text,
        "model.config.vision_config": {"model_type": "clip_vision_model", **_VISION},
        "data.processor": {**processor, "tokens_per_image": tokens},
    }


# The settings that differ from the yaml, but for --quick.
EXAMPLES = {
    "pretrain": lambda: _with_config("config", max_position_embeddings=2048) | _text(2048, 8),
    "sft": lambda: _with_config("config"),
    "multiple_choice": lambda: _with_config("config"),
    "lora": lambda: _with_config("config"),
    "long_context": lambda: _with_config("config", max_position_embeddings=_LONG) | _text(_LONG, 1),
    "vision_language": _images,
    "plain_module": lambda: _plain() | _text(2048, 4),
    "fabric_loop": _sizes,
    "dpo": lambda: _with_config("config"),
    "kto": lambda: _with_config("config"),
    "grpo_offline": lambda: _with_config("config"),
    "distill": lambda: _with_config("config", "teacher_config"),
    "distill_topk": lambda: _with_config("config"),
    "medusa": lambda: _with_config("config"),
    "multi_node": lambda: _with_config("config", max_position_embeddings=2048) | _text(2048, 8),
}
_NUM_NODES = {"multi_node": 2}
_ON_TEXT = ("pretrain", "long_context", "plain_module", "fabric_loop", "multi_node")
_MAX_BYTES_LEFT = 2**26
"""Of GPU memory after an example, with which the next one begins in a new process."""


class Meter(L.Callback):
    """Seconds, tokens and loss of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self.losses: list[Tensor] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._synchronize(trainer)
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._synchronize(trainer)
        self.seconds.append(time.perf_counter() - self._start)
        self.tokens.append(num_tokens(batch))
        self.losses.append(outputs["loss"].detach())

    def _synchronize(self, trainer: L.Trainer) -> None:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()


def num_tokens(batch: dict[str, Tensor]) -> int:
    """Tokens that the model sees, padding left out."""
    masks = [mask for key, mask in batch.items() if key.endswith("attention_mask")]
    if not masks and "prompt_mask" in batch:
        masks = [batch["prompt_mask"], batch["completion_mask"]]
    return sum(int(mask.sum()) for mask in masks) if masks else batch["input_ids"].numel()


def measure(name: str, quick: bool, steps: int, batch_size: int) -> dict[str, Any]:
    """The record of one example, trained in this process."""
    os.chdir(ROOT)  # where the command at the top of the yaml is run
    cuda, variables = torch.cuda.is_available(), dict(os.environ)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    settings = {} if quick else EXAMPLES[name]()
    try:
        if name == "fabric_loop":
            found = _measure_loop(settings, steps, cuda)
        else:
            if name not in _ON_TEXT:
                settings["data.batch_size"] = batch_size
            settings["model.learning_rate"] = 1e-3 if quick else 1e-5
            found = _measure_yaml(name, settings, steps, cuda)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ |= variables
    module, parameters, seconds, tokens, losses = found
    warm = len(seconds) // 2  # compilation of kernels, and measuring for a memory budget, is in the steps before
    return {
        "example": name,
        "module": module,
        "parameters": parameters,
        "steps": len(seconds),
        "tokens_per_step": statistics.mean(tokens[warm:]),
        "tokens_per_second": sum(tokens[warm:]) / sum(seconds[warm:]),
        "step_ms": 1e3 * statistics.median(seconds[warm:]),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


_Found = tuple[str, int, list[float], list[int], list[float]]
"""The name of the module, its number of parameters; seconds, tokens and loss of each step."""


def _measure_yaml(name: str, settings: dict[str, Any], steps: int, cuda: bool) -> _Found:
    from lightning_liger.cli import LigerCLI  # it imports much

    sys.argv = ["lightning-liger"]
    with tempfile.TemporaryDirectory() as folder:
        cli = LigerCLI(
            args=[
                "fit",
                f"--config=examples/{name}.yaml",
                *(f"--{key}={json.dumps(value)}" for key, value in settings.items()),
                f"--trainer.accelerator={'gpu' if cuda else 'cpu'}",
                "--trainer.devices=1",
                f"--trainer.precision={'bf16-true' if cuda else '32-true'}",
                f"--trainer.max_steps={steps}",
                "--trainer.max_epochs=1000",
                "--trainer.accumulate_grad_batches=1",
                "--trainer.check_val_every_n_epoch=1000",
                f"--trainer.default_root_dir={folder}",
                f'--trainer.callbacks=[{{"class_path": "{__name__}.Meter"}}]',
                "--trainer.enable_checkpointing=false",
                "--trainer.enable_progress_bar=false",
            ]
        )
    (meter,) = (callback for callback in cli.trainer.callbacks if isinstance(callback, Meter))
    losses = torch.stack(meter.losses).tolist()
    parameters = sum(parameter.numel() for parameter in cli.model.parameters())
    return type(cli.model).__name__, parameters, meter.seconds, meter.tokens, losses


def _measure_loop(sizes: dict[str, Any], steps: int, cuda: bool) -> _Found:
    """The functions of ``examples/fabric_loop.py``, on rows of random tokens."""
    from examples.fabric_loop import SIZES, make_model, train

    fabric = L.Fabric(
        strategy="liger",
        accelerator="gpu" if cuda else "cpu",
        devices=1,
        precision="bf16-true" if cuda else "32-true",
    )
    fabric.launch()
    fabric.seed_everything(42)
    model = make_model(fabric, **sizes)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-5))
    shape = (8, 2048) if sizes else (4, 128)
    rows = [torch.randint((SIZES | sizes)["vocab_size"], shape, device=fabric.device) for _ in range(4)]
    batches = itertools.cycle([{"input_ids": row, "labels": row} for row in rows])
    seconds, losses = [], []
    for _ in range(steps):
        start = time.perf_counter()
        losses += [float(loss) for loss in train(fabric, model, optimizer, batches, 1, accumulate=1)]  # waits for it
        seconds.append(time.perf_counter() - start)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return "Fabric", parameters, seconds, [rows[0].numel()] * steps, losses


def measure_and_clean(*arguments: Any) -> tuple[dict[str, Any], int]:
    """The record of :func:`measure`, and how many bytes of GPU memory are left in use."""
    record = measure(*arguments)
    gc.collect()  # modules and hooks refer to each other
    if not torch.cuda.is_available():
        return record, 0
    torch.cuda.empty_cache()
    return record, torch.cuda.memory_allocated()


def measure_on_nodes(num_nodes: int, *arguments: Any) -> dict[str, Any]:
    """The record of :func:`measure` in processes that take themselves for the only one of a node with one GPU."""
    with tempfile.TemporaryDirectory() as folder:
        # It ends the others if one fails.
        torch.multiprocessing.spawn(_measure_on_node, (free_port(), Path(folder), arguments), num_nodes)
        records = [json.loads((Path(folder) / str(node)).read_text(encoding="utf-8")) for node in range(num_nodes)]
    summed = ("parameters", "tokens_per_step", "tokens_per_second")  # each has its shards and its batches
    return {
        **records[0],
        "nodes": num_nodes,
        **{key: sum(record[key] for record in records) for key in summed},
        "step_ms": max(record["step_ms"] for record in records),
        "peak_gib": max(record["peak_gib"] for record in records) if records[0]["peak_gib"] else None,
        **{key: statistics.mean(record[key] for record in records) for key in ("first_loss", "last_loss")},
    }


def _measure_on_node(node: int, port: int, folder: Path, arguments: tuple[Any, ...]) -> None:
    visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NODE_RANK": str(node),
        "LOCAL_RANK": "0",
        "CUDA_VISIBLE_DEVICES": visible[node] if visible else str(node),
    }
    (folder / str(node)).write_text(json.dumps(measure(*arguments)), encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        type=names("example", tuple(EXAMPLES)),
        metavar="EXAMPLE,...",
        help=f"which examples (default: all that this machine has the GPUs for): {', '.join(EXAMPLES)}",
    )
    parser.add_argument("--steps", type=int, default=12, metavar="N", help="half of them are measured (default: 12)")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="records in a batch (default: 16)")


def run(options: argparse.Namespace, stem: str, console: Console) -> bool:
    """Measures, prints and writes; returns whether all examples ran."""
    records: list[dict[str, Any]] = []
    process: ProcessPoolExecutor | None = None
    with Writer(Path(f"{stem}.jsonl"), environment(), "examples") as writer:
        for name in options.only or [name for name in EXAMPLES if _fits(name)]:
            arguments = (name, options.quick, max(2, options.steps), options.batch_size)
            start, bytes_left = time.perf_counter(), _MAX_BYTES_LEFT + 1
            try:
                if name in _NUM_NODES:
                    record = measure_on_nodes(_NUM_NODES[name], *arguments)
                else:
                    process = process or ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
                    record, bytes_left = process.submit(measure_and_clean, *arguments).result()
            except Exception as error:  # a row of the results: the others go on
                record = {"example": name, "error": f"{type(error).__name__}: {error}"[:500]}
            records.append(record)
            writer.write(Line(record))
            console.print(f"{name}: {time.perf_counter() - start:.1f} s")
            if bytes_left > _MAX_BYTES_LEFT and process is not None:
                process.shutdown()
                process = None
    if process is not None:
        process.shutdown()
    console.print(table(records))
    return not any("error" in record for record in records)


def _fits(name: str) -> bool:
    return not torch.cuda.is_available() or torch.cuda.device_count() >= _NUM_NODES.get(name, 1)


def table(records: Sequence[dict[str, Any]]) -> Table:
    """A row for each example."""
    grid = Table(title="Examples", title_justify="left")
    for column in ("example", "module"):
        grid.add_column(column)
    for column in ("parameters", "tokens/step", "step ms", "tokens/s", "peak GiB", "first loss", "final loss"):
        grid.add_column(column, justify="right", no_wrap=True)
    for record in records:
        if "error" in record:
            grid.add_row(record["example"], record["error"], *["-"] * 7)
            continue
        grid.add_row(
            record["example"],
            record["module"],
            f"{record['parameters'] / 1e6:,.1f}M",
            f"{record['tokens_per_step']:,.0f}",
            f"{record['step_ms']:,.1f}",
            f"{record['tokens_per_second']:,.0f}",
            number(record["peak_gib"], ".1f"),
            f"{record['first_loss']:.4f}",
            f"{record['last_loss']:.4f}",
        )
    return grid
