"""``lightning-liger inspect``: what is replaced in a model, the memory of training it, and what fits on a GPU."""

import itertools
import json as json_format
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from lightning_liger.estimate.memory import OURS, Inspection, inspect_model
from lightning_liger.estimate.states import STRATEGIES, OptimizerName, PrecisionName, StrategyName
from lightning_liger.hardware import GpuName

_GIB = 2**30
_COLUMNS = ("weights", "gradients", "optimizer", "activations", "logits")


def run_inspect(
    model: str,
    *,
    config: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    batch_size: int = 1,
    seq_len: int = 2048,
    num_gpus: int = 1,
    strategy: StrategyName | None = None,
    precision: PrecisionName = "bf16-true",
    optimizer: OptimizerName = "adamw",
    memory_budget: float | str | None = None,
    fp8: bool = False,
    gpu: GpuName | None = None,
    revision: str | None = None,
    json: bool = False,
) -> int:
    """Show what is replaced in a model, the memory of training it, and what fits on a GPU.

    Needs no GPU and no weights: a training step runs on PyTorch's meta device.

    Args:
        model: A folder with config.json, a name on the Hub such as Qwen/Qwen3-0.6B, or an architecture such as llama.
        config: Settings that override the model's, as in --config.hidden_size 4096.
        lora: Train adapters only, with these arguments of peft's LoraConfig, as in --lora.r 16.
        batch_size: Rows per GPU.
        seq_len: Tokens per row.
        num_gpus: How many GPUs train together.
        strategy: By default single for one GPU and fsdp for more.
        precision: A precision of Lightning's Trainer; mixed ones need fsdp or deepspeed_stage_*.
        optimizer: adamw is PyTorch's with fused=True, adamw_foreach its default; adamw_bfloat16 and adamw_8bit are
            LigerCausalLM's with that state_dtype.
        memory_budget: For the plan of layers, as strategies take it: GiB above 1, or a share of the GPU up to 1 or
            auto, which need --gpu.
        fp8: Whether linear layers run in float8 with our strategies.
        gpu: The GPU on which training has to fit; also sets memory_budget to auto.
        revision: Branch, tag or commit of a model on the Hub.
        json: Print JSON, with the keys that docs/inspect.md lists.

    Returns:
        The exit status, 0.
    """
    found = inspect_model(
        model, config=config, lora=lora, batch_size=batch_size, seq_len=seq_len, num_gpus=num_gpus, strategy=strategy,
        precision=precision, optimizer=optimizer, memory_budget=memory_budget, fp8=fp8, gpu=gpu, revision=revision,
    )  # fmt: skip
    if json:
        print(json_format.dumps(found.as_dict(), indent=2))
    else:
        console = Console()
        console.width = max(console.width, 80)  # narrower tables would lose digits
        show(found, console)
    return 0


def show(found: Inspection, console: Console) -> None:
    """Prints an inspection as tables."""
    settings = found.settings
    active = "" if found.num_active == found.num_parameters else f", {_count(found.num_active)} active"
    trained = "" if found.num_trained == found.num_parameters else f", {_count(found.num_trained)} trained"
    where = f"{settings.num_gpus} GPU{'s' if settings.num_gpus > 1 else ''}"
    where += "" if settings.strategy == "single" else f", {STRATEGIES[settings.strategy].title}"
    parameters = f"{found.model_type}, {_count(found.num_parameters)} parameters{active}{trained}"
    console.print(f"[bold]{escape(found.model)}[/bold] ({parameters})", highlight=False)
    tokens = f"{settings.batch_size} x {settings.seq_len:,} tokens per GPU"
    console.print(
        f"{tokens}, {where}, {settings.precision}{', float8' if settings.fp8 else ''}, {settings.optimizer}\n",
        highlight=False,
    )
    console.print(found.kernels, "")
    in_float8, seconds = found.float8_flops_per_token, found.step_seconds(settings.fp8)
    parts = f", {in_float8 / 1e9:,.4g} of them in float8" if in_float8 else ""
    flops = f"{found.flops_per_token / 1e9:,.4g} GFLOP"
    texts = [f"A token takes {flops} in forward and backward, of the model's own{parts}."]
    if seconds is not None:
        without = f", {found.step_seconds(False):.3g} s without float8" if in_float8 else ""
        texts.append(f"By its FLOPs, a step without recomputation takes about {seconds:.3g} s{without}.")
    if found.unknown is None:
        console.print(_memory(found))
        most = {row.implementation: _gib(row.logits_bytes) for row in found.rows}
        sizes = ", ".join(f"{size} with {name}" for name, size in most.items())
        texts.append(f"Peak of logits and loss: {sizes}.")
    else:
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in found.state_bytes.items())
        reason = f"the forward of {found.model_type} does not run on the meta device ({found.unknown})"
        texts.append(f"GiB per GPU: {parts}. Activations and logits are unknown: {reason}.")
    budget = settings.memory_budget
    name = f"plan of memory_budget={budget if isinstance(budget, str) else f'{budget:g}'}" if budget else ""
    plan = next((row for row in found.rows if row.plan), None)
    if plan is not None and found.budget_bytes is not None:
        smallest = "" if plan.total <= found.budget_bytes else ". It exceeds the budget: no plan has a lower peak"
        texts.append(f"The {name}, {_gib(found.budget_bytes)} GiB: {plan.plan}{smallest}.")
    for text in texts:
        console.print(text, highlight=False, markup=False)
    if found.fits and found.gpu is not None and found.limit_bytes is not None:
        table = _table(f"What fits on {found.gpu.name}: {_gib(found.limit_bytes)} GiB of tensors", "Layers")
        table.add_column(f"Longest seq_len\n(batch_size {settings.batch_size})", justify="right")
        table.add_column(f"Largest batch_size\n(seq_len {settings.seq_len})", justify="right")
        for fit in found.fits:
            numbers = (f"{number:,}" if number else "none" for number in (fit.longest_seq_len, fit.largest_batch_size))
            table.add_row(f"{fit.implementation}, {name if fit.implementation == OURS else fit.activations}", *numbers)
        console.print("", table)
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def _memory(found: Inspection) -> Table:
    sizes = [Column(name.capitalize(), justify="right", no_wrap=True) for name in _COLUMNS]
    total = Column("Total", justify="right", style="bold", no_wrap=True)
    table = _table("GiB per GPU at the peak of a step", Column("Layers", no_wrap=True), *sizes, total)
    if found.limit_bytes is not None:
        table.add_column("Fits")
    for implementation, rows in itertools.groupby(found.rows, lambda row: row.implementation):
        table.add_row(f"[bold]{implementation}[/bold]")
        for row in rows:
            fits = {None: None, True: "yes", False: "[red]no[/red]"}[row.fits]
            numbers = (_gib(size) for size in (*(row.num_bytes[name] for name in _COLUMNS), row.total))
            table.add_row(f"  {row.activations}", *numbers, fits)
    return table


def _table(title: str, *columns: Column | str) -> Table:
    style: Any = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "padding": (0, 1, 0, 0)}
    return Table(*columns, title=title, title_justify="left", title_style="bold", **style)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f}"


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return str(number)
