"""``lightning-liger inspect``: what is replaced in a model, the memory of training it, and what fits a GPU."""

import json as json_format
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_liger.estimate.memory import OURS, Fit, Inspection, inspect_model
from lightning_liger.estimate.states import STRATEGIES

_GIB = 2**30
_WIDTH = 80
"""Of tables at least: narrower ones would lose digits."""
_NOTES_OF_FIT = {None: None, True: "yes", False: "[red]no[/red]"}
_COLUMNS = ("weights", "gradients", "optimizer", "activations", "logits")


def run_inspect(
    model: str,
    *,
    config: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    batch_size: int = 1,
    seq_len: int = 2048,
    num_gpus: int = 1,
    strategy: str | None = None,
    precision: str = "bf16-true",
    optimizer: str = "adamw",
    memory_budget: float | str | None = None,
    gpu: str | None = None,
    json: bool = False,
) -> int:
    """Show what is replaced in a model, the memory of training it, and what fits a GPU.

    Needs no GPU, no weights and no network: a training step runs on PyTorch's meta device.

    Args:
        model: A folder with config.json, a name in the local Hugging Face cache, or an architecture such as llama.
        config: Settings in place of the model's own, as in --config.hidden_size 4096.
        lora: Train adapters only, with these arguments of peft's LoraConfig, as in --lora.r 16.
        batch_size: Rows on each GPU.
        seq_len: Tokens of each row.
        num_gpus: How many GPUs train together.
        strategy: single, ddp, fsdp, fsdp2, deepspeed_stage_1, deepspeed_stage_2 or deepspeed_stage_3; by default
            single for one GPU and fsdp for more.
        precision: As of Lightning's Trainer: bf16-true, 16-true, 32-true; bf16-mixed and 16-mixed with fsdp and
            deepspeed_stage_*.
        optimizer: adamw (with fused=True), adamw_foreach (PyTorch's default), sgd or sgd_momentum.
        memory_budget: For the plan of layers, as strategies take it: GiB above 1, or a share of the GPU up to 1 or
            auto, which need --gpu.
        gpu: What has to fit; also sets memory_budget to auto. One of h100-80gb, h100-pcie-80gb, h100-nvl-94gb,
            h200-141gb, h200-nvl-141gb, h800-80gb, h20-96gb, gh200-96gb, gh200-144gb, b200-180gb, gb200-186gb,
            b300-288gb, a100-80gb, a100-pcie-80gb, a100-40gb, a800-80gb, a40-48gb, a30-24gb, a10-24gb, a10g-24gb,
            l40s-48gb, l40-48gb, l4-24gb, t4-16gb, v100-32gb, v100-16gb, v100-pcie-32gb, v100-pcie-16gb, rtx5090-32gb,
            rtx4090-24gb, rtx3090-24gb, rtxa6000-48gb, rtx6000ada-48gb, rtxpro6000-96gb, mi250x-64gb, mi300x-192gb,
            mi325x-256gb, mi355x-288gb.
        json: Print JSON, with the keys that docs/inspect.md lists.

    Returns:
        The exit status, 0.
    """
    found = inspect_model(
        model,
        config=config,
        lora=lora,
        batch_size=batch_size,
        seq_len=seq_len,
        num_gpus=num_gpus,
        strategy=strategy,
        precision=precision,
        optimizer=optimizer,
        memory_budget=memory_budget,
        gpu=gpu,
    )
    if json:
        print(json_format.dumps(found.as_dict(), indent=2))
    else:
        console = Console()
        console.width = max(console.width, _WIDTH)
        show(found, console)
    return 0


def show(found: Inspection, console: Console) -> None:
    """Prints an inspection as tables."""
    console.print(_head(found), highlight=False)
    console.print()
    console.print(found.kernels)
    console.print()
    if found.unknown is None:
        console.print(_memory(found))
        most = {row.implementation: _gib(row.logits_bytes) for row in found.rows}
        sizes = ", ".join(f"{size} with {name}" for name, size in most.items())
        console.print(f"Logits and loss take at most: {sizes}.", highlight=False)
    else:
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in found.state_bytes.items())
        console.print(
            f"GiB of each GPU: {parts}. Activations and logits are unknown: the forward of {found.model_type} does not"
            f" run on the meta device ({found.unknown}).",
            highlight=False,
            markup=False,
        )
    plan = next((row for row in found.rows if row.plan), None)
    if plan is not None and found.budget_bytes is not None:
        smallest = "" if plan.total <= found.budget_bytes else ". It exceeds the budget: no plan has a lower peak"
        text = f"The plan of {_budget(found)}, {_gib(found.budget_bytes)} GiB: {plan.plan}{smallest}."
        console.print(text, highlight=False)
    if found.fits:
        console.print()
        console.print(_fits(found))
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def _head(found: Inspection) -> str:
    settings = found.settings
    trained = "" if found.num_trained == found.num_parameters else f", {_count(found.num_trained)} trained"
    gpus = f"{settings.num_gpus} GPU{'s' if settings.num_gpus > 1 else ''}"
    where = gpus if settings.strategy == "single" else f"{gpus}, {STRATEGIES[settings.strategy].title}"
    return (
        f"[bold]{escape(found.model)}[/bold] ({found.model_type}, {_count(found.num_parameters)} parameters{trained})\n"
        f"{settings.batch_size} x {settings.seq_len:,} tokens on each GPU, {where}, {settings.precision},"
        f" {settings.optimizer}"
    )


def _memory(found: Inspection) -> Table:
    table = _table("GiB of each GPU at the peak of a step")
    table.add_column("Layers", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name.capitalize(), justify="right", no_wrap=True)
    table.add_column("Total", justify="right", style="bold", no_wrap=True)
    if found.limit_bytes is not None:
        table.add_column("Fits")
    before = None
    for row in found.rows:
        if row.implementation != before:
            table.add_row(f"[bold]{row.implementation}[/bold]")
            before = row.implementation
        sizes = [_gib(row.num_bytes[name]) for name in _COLUMNS]
        table.add_row(f"  {row.activations}", *sizes, _gib(row.total), _NOTES_OF_FIT[row.fits])
    return table


def _fits(found: Inspection) -> Table:
    settings, gpu = found.settings, found.gpu
    assert gpu is not None
    assert found.limit_bytes is not None
    title = f"What fits {gpu.name}: {_gib(found.limit_bytes)} GiB of tensors"
    table = _table(title)
    table.add_column("Layers")
    table.add_column(f"Longest seq_len\n(batch_size {settings.batch_size})", justify="right")
    table.add_column(f"Largest batch_size\n(seq_len {settings.seq_len})", justify="right")
    for fit in found.fits:
        table.add_row(*_fit_cells(fit, f"plan of {_budget(found)}"))
    return table


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def _budget(found: Inspection) -> str:
    value = found.settings.memory_budget
    return f"memory_budget={value if isinstance(value, str) else f'{value:g}'}"


def _fit_cells(fit: Fit, plan: str) -> list[str]:
    numbers = (f"{number:,}" if number else "none" for number in (fit.longest_seq_len, fit.largest_batch_size))
    how = plan if fit.implementation == OURS else fit.activations
    return [f"{fit.implementation}, {how}", *numbers]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f}"


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return str(number)
