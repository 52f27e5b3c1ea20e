"""``python -m benchmarks COMMAND``: measures, prints tables, writes results and draws figures."""

import argparse
import dataclasses
import importlib.util
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import experts, fp8, loss_sweep, records, tables, timing
from benchmarks.arguments import names
from benchmarks.cases import AGAINST, Op
from benchmarks.environment import environment
from benchmarks.loss import LOSS
from benchmarks.losses import command as losses
from benchmarks.ops import OPS
from benchmarks.run import Runner, Settings, rms_norm_host_us
from benchmarks.training import (
    activations,
    context,
    convergence,
    examples,
    host,
    medusa,
    models,
    optimizer,
    packing,
    train,
)

_OUT_HELP = (
    "where to write: a path without suffix, such as benchmarks/results/ops_h200, makes ops_h200.jsonl and"
    " ops_h200_<figure>.png there; a folder (one that exists, or a path that ends in /) makes {name}.jsonl in it"
)
_SUFFIXES = (".json", ".jsonl", ".png")
_MODULES = {
    "losses": (losses, "post-training losses over an LM head"),
    "train": (train, "a model within memory budgets, under each implementation"),
    "context": (context, "the longest sequences that fit"),
    "medusa": (medusa, "a model with Medusa's heads"),
    "examples": (examples, "the recipes of examples/ on one GPU"),
    "activations": (activations, "bytes that layers keep between forward and backward"),
    "convergence": (convergence, "losses with kernels and plans, and without"),
    "experts": (experts, "a layer of experts, forward and backward"),
    "fp8": (fp8, "the linear layers of one decoder layer in float8 and bfloat16"),
    "optimizer": (optimizer, "AdamW's step, compared with PyTorch's"),
    "packing": (packing, "examples of different lengths in padded, padding-free and packed batches"),
    "host": (host, "small steps, which wait for the host"),
    "models": (models, "two layers of many models, with their distance to float64"),
}
"""Commands of a module each: losses, and whole models."""


def _stem(text: str) -> str:
    if text.endswith(_SUFFIXES):
        raise argparse.ArgumentTypeError(f"{text!r} has a suffix; give a path without one, or a folder")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Compares this project with others.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    ops = commands.add_parser("ops", help="the memory-bound ops")
    loss = commands.add_parser("loss", help="the LM head with its loss")
    ops.add_argument(
        "--only",
        type=names("op", tuple(OPS)),
        default=tuple(OPS),
        metavar="OP,...",
        help=f"which ops (default: all): {', '.join(OPS)}",
    )
    ops.add_argument(
        "--sweeps",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether to also measure a range of sizes, which the figures and the paper's claims need",
    )
    for command in (ops, loss):
        command.add_argument(
            "--against",
            type=names("contender", AGAINST),
            default=AGAINST,
            metavar="CONTENDER,...",
            help=f"contenders to compare ours with (default: all): {', '.join(AGAINST)}",
        )
    measuring = {"ops": ops, "loss": loss}
    for name, (module, help) in _MODULES.items():
        measuring[name] = commands.add_parser(name, help=help, description=module.__doc__)
        module.add_arguments(measuring[name])
    for name, command in measuring.items():
        command.add_argument(
            "--quick", action="store_true", help="tiny sizes, a few repeats: a trial that also runs on a CPU"
        )
        command.add_argument("--out", type=_stem, required=True, metavar="PATH", help=_OUT_HELP.format(name=name))
    loss.add_argument(
        "--sweep", action="store_true", help="heads of real models with few and many tokens, with a verdict on each"
    )
    loss.add_argument(
        "--heads",
        type=loss_sweep.parse_heads,
        default=tuple(loss_sweep.HEADS),
        metavar="HIDDENxVOCAB,...",
        help=f"heads of the sweep (default: the {len(loss_sweep.HEADS)} of real models)",
    )
    loss.add_argument(
        "--tokens",
        type=loss_sweep.parse_tokens,
        default=loss_sweep.NUM_TOKENS,
        metavar="NUMBER,...",
        help=f"numbers of tokens of the sweep (default: {','.join(map(str, loss_sweep.NUM_TOKENS))})",
    )
    loss.add_argument("--repeats", type=int, default=5, help="fewest steps that a time of the sweep is the median of")
    plot = commands.add_parser("plot", help="draw the figures again from records")
    plot.add_argument("records", type=Path, help="a .jsonl file that a command wrote")
    plot.add_argument("--out", type=_stem, metavar="PATH", help="start of the figures' paths (default: the records')")
    return parser


def _resolve_stem(out: str, name: str) -> str:
    """The start of the paths to write; creates their folder."""
    if out.endswith("/") or Path(out).is_dir():
        out = str(Path(out) / name)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    return out


def _measure(ops: Sequence[Op], settings: Settings, stem: str, console: Console) -> bool:
    """Measures, prints and writes; returns whether all of our implementations ran."""
    about = environment() | {
        "copy_tb_s": settings.rates and settings.rates.copy / 1e12,
        "matrix_tflop_s": settings.rates and settings.rates.matrix / 1e12,
        "rms_norm_host_us": rms_norm_host_us(settings, OPS["rms_norm"]),
    }
    console.print(
        ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in about.items()
        )
    )
    runner = Runner(settings, say=console.print)
    # Before the profiler first runs: launches may cost more afterward.
    small = {op.name: runner.measure_small(op) for op in ops}
    found: list[records.Record] = []
    with records.Writer(Path(f"{stem}.jsonl"), about) as writer:
        for op in ops:
            mine = []
            for record in runner.measure(op, small[op.name]):
                writer.write(record)
                mine.append(record)
            if mine:
                console.print(tables.op_table(op.name, mine))
            found += mine
    console.print(tables.host_table(found, about))
    if any(record.suite == "sweep" for record in found):
        console.print(tables.claims_table(found))
    return not any(name.startswith("ours") for name in runner.failed)


def _measure_ops(options: argparse.Namespace, stem: str, console: Console) -> bool:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = Settings(
        device=device,
        against=options.against,
        effort=timing.QUICK if options.quick else timing.Effort(),
        rates=timing.Rates.measure(device) if device.type == "cuda" else None,
        tiny=options.quick,
        sweeps=options.command == "ops" and options.sweeps,
        in_turns=options.command == "loss" and options.sweep,
    )
    if options.command == "loss" and options.sweep:
        return _sweep(options, settings, stem, console)
    ops = [LOSS] if options.command == "loss" else [OPS[name] for name in options.only]
    return _measure(ops, settings, stem, console)


def _sweep(options: argparse.Namespace, settings: Settings, stem: str, console: Console) -> bool:
    """Measures the loss over heads and numbers of tokens, prints verdicts; returns whether ours ran everywhere."""
    effort = timing.Effort(min_repeats=max(2, options.repeats))
    runner = Runner(dataclasses.replace(settings, effort=settings.effort if settings.tiny else effort), console.print)
    op = loss_sweep.sweep_op(options.heads, options.tokens)
    found: list[records.Record] = []
    with records.Writer(Path(f"{stem}.jsonl"), environment()) as writer:
        for record in loss_sweep.measure(op, runner):
            writer.write(record)
            found.append(record)
    console.print(loss_sweep.sweep_table(found, [op.tiny] if settings.tiny else op.shapes), width=300, crop=False)
    return not any(name.startswith("ours") for name in runner.failed)


def _draw(file: Path, stem: str, console: Console) -> None:
    from benchmarks import plots  # needs matplotlib, which the package itself does not
    from benchmarks.training import figures

    results = records.read_results(file)
    paths = plots.draw(*records.read(file), stem) if results.command is None else figures.draw(results, stem)
    for path in paths:
        console.print(f"wrote {path}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=170)  # else tables are cut to 80 columns
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    if options.command == "plot":
        if not has_matplotlib:
            parser.error("figures need matplotlib: pip install 'lightning-liger[plots]'")
        try:
            _draw(options.records, _resolve_stem(options.out or str(options.records.with_suffix("")), "plot"), console)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        return 0

    if not torch.cuda.is_available() and not options.quick:
        parser.error("this needs a GPU; with --quick it runs on a CPU")
    stem = _resolve_stem(options.out, options.command)
    if options.command in _MODULES:
        module, _ = _MODULES[options.command]
        worked = module.run(options, stem, console)
    else:
        worked = _measure_ops(options, stem, console)
    console.print(f"wrote {stem}.jsonl")
    if options.command == "loss" and options.sweep:
        return 0 if worked else 1  # its table has no figure
    if has_matplotlib:
        _draw(Path(f"{stem}.jsonl"), stem, console)
    else:
        console.print("no figures: they need matplotlib, pip install 'lightning-liger[plots]'", markup=False)
    return 0 if worked else 1


if __name__ == "__main__":
    # Ends as by Ctrl-C, so that no process that trains is left on the GPU.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
