"""Writes docs/models.md: the replaced modules of a tiny model of every causal LM architecture.

python -m tests.lightning_liger.models_table docs/models.md
"""

import functools
import sys
import warnings
from collections.abc import Iterable
from datetime import date
from pathlib import Path

import torch
import transformers
from rich.progress import track
from transformers import PreTrainedModel

from lightning_liger import apply_liger_kernels
from lightning_liger.patching import PatchEntry
from tests.lightning_liger import compiled_models
from tests.lightning_liger.architectures import CAUSAL_LM_TYPES, UNBUILDABLE, tiny_causal_lm, tiny_inputs

COLUMNS = {
    "norms": ("rms_norm", "layer_norm", "gated_rms_norm"),
    "rotary": ("rope",),
    "MLP": ("silu_mul", "gelu_mul", "relu_squared"),
    "experts": ("moe_experts",),
}
HEADER = """# Replaced modules by architecture

`apply_liger_kernels` recognizes structures, not names. This table shows what it finds in a small model of every
architecture of `AutoModelForCausalLM` in transformers {version}, with all of its kinds of layers. `make docs` writes
this page.

- A kernel's name: every module of that kind is replaced by it. In parentheses: modules that are not replaced.
- Empty: the architecture has nothing of that kind (or nothing that resembles an op of `liger_ops`).
- Loss: "fused" if `model(..., labels=...).loss` never materializes the logits.
- `torch.compile`: the graphs of a training step of the patched model, as many as of the stock model if none are in
  parentheses; empty if not measured. "Real logits": a graph has a tensor of their size.
  [Below](#models-under-torchcompile) are counts and reasons.

| architecture | norms | rotary | MLP | experts | loss | `torch.compile` |
|---|---|---|---|---|---|---|
"""


RELEASES = {"5.24.0": ("2026-11-21", "2026-11-27"), "5.23.0": ("2026-11-13", "2026-11-21")}
"""By version of transformers, newest first: the day of its release on PyPI, and of the commit with which the tests of
all of its architectures pass."""

SUMMARY = """
## New versions of transformers

Days from a release on PyPI to the commit with which the tests of all of its architectures pass:

{releases}

Version 5.23.0 is older than this project, which began on 2026-11-20. A weekly workflow runs the tests with the newest
versions ([CONTRIBUTING.md](../CONTRIBUTING.md#development)), and `pyproject.toml` allows those that passed.

## Models under torch.compile

`python -m tests.lightning_liger.compiled_models` compiles a training step of each model, patched and stock, on a CPU,
and looks for logits in all graphs, forward and backward. Of {all} models that compute a loss

- {fused} have no logits in their graphs: {single} in one graph, {several} in several, of which {more} have more than
  the stock model, since replaced modules are compiled where PyTorch runs its own outside of graphs;
- {real} have real logits:
  {names}.
  Most make an `nn.CrossEntropyLoss()` in their forward, which the compiler calls without asking its arguments, as a
  warning says. BLT's are those of its model of entropies; its loss is fused. The heads of Musicgen are a list, which is
  not replaced.

{failed}The loss and the gradients of compiled patched models differ from those of eager ones by at most {distance:.0e}
of their norm, of compiled stock models by at most {stock_distance:.0e}.
"""


def _cell(column: str, entries: Iterable[PatchEntry]) -> str:
    mine = [entry for entry in entries if entry.kernel in COLUMNS[column]]
    replaced = dict.fromkeys(entry.replacement.partition(", packed")[0] for entry in mine if entry.replacement)
    kept = dict.fromkeys(entry.structure for entry in mine if entry.replacement is None)
    return ", ".join(f"`{name}`" for name in replaced) + (f" ({', '.join(kept)})" if kept else "")


def _loss(model: PreTrainedModel) -> str:
    if "labels" not in tiny_inputs(model):
        return ""
    counters = getattr(model.get_output_embeddings(), "fusion_counters", None)
    is_fused = counters is not None and (counters.num_losses, counters.num_materialized) == (1, 0)
    return "fused" if is_fused else "materialized logits"


_measured = functools.cache(compiled_models.read)


def _compiled(model_type: str) -> str:
    """What :mod:`tests.lightning_liger.compiled_models` has measured, empty if the model computes no loss."""
    found = _measured().get(model_type, {})
    if isinstance(found.get("stock"), str):
        return "stock: no"
    if not isinstance(found.get("patched"), int):
        return "no" if "patched" in found else ""
    others = "" if found["stock"] == found["patched"] else f" (stock: {found['stock']})"
    logits = ", real logits" if found["patched_logits"] else ""
    return f"{found['patched']} graph{'s' * (found['patched'] > 1)}{others}{logits}"


def row(model_type: str, patched: PreTrainedModel | None, entries: Iterable[PatchEntry] = ()) -> str:
    """One line of the table, of a patched model that has computed one loss, and of what was reported."""
    if patched is None:
        return f"| {model_type} | not tried: {UNBUILDABLE[model_type]} | | | | | |\n"
    cells = [_cell(column, entries) for column in COLUMNS]
    return f"| {model_type} | {' | '.join(cells)} | {_loss(patched)} | {_compiled(model_type)} |\n"


def _made_row(model_type: str) -> str:
    if model_type in UNBUILDABLE:
        return row(model_type, None)
    model = tiny_causal_lm(model_type)
    entries = apply_liger_kernels(model).entries
    model(**tiny_inputs(model))
    return row(model_type, model, entries)


def _days(first: str, last: str) -> int:
    return (date.fromisoformat(last) - date.fromisoformat(first)).days


def summary() -> str:
    """Counts of what :func:`_compiled` says."""
    found = {name: each for name, each in _measured().items() if "stock" in each}
    measured = {name: each for name, each in found.items() if isinstance(each.get("patched"), int)}
    fused = [each for each in measured.values() if not each["patched_logits"]]
    real = [name for name, each in measured.items() if each["patched_logits"]]
    failed = [f"`{name}`: {each.get('patched', each['stock'])}" for name, each in found.items() if name not in measured]
    return SUMMARY.format(
        releases="\n".join(f"- {version}, released on {days[0]}: {_days(*days)}" for version, days in RELEASES.items()),
        all=len(found),
        fused=len(fused),
        single=sum(each["patched"] == 1 for each in fused),
        several=sum(each["patched"] > 1 for each in fused),
        more=sum(each["patched"] > each["stock"] for each in fused),
        real=len(real),
        names=", ".join(f"`{name}`" for name in real),
        failed="".join(f"{each}\n\n" for each in failed),
        distance=max(each["patched_distance"] for each in measured.values()),
        stock_distance=max(each["stock_distance"] for each in measured.values()),
    )


def main() -> None:
    """Writes the page to the path that the command line gives."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = "".join(map(_made_row, track(CAUSAL_LM_TYPES, "Patching")))
    page = HEADER.format(version=transformers.__version__) + rows + summary()
    Path(sys.argv[1]).write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
