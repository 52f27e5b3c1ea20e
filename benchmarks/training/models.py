"""Whole models at real width, patched and unpatched: time, memory and distance to float64 of a step.

    python -m benchmarks.models --out benchmarks/results/models_h200.json

Each model has two layers of its real width and random weights in bfloat16. Errors are relative L2 distances of all
gradients together, and of the loss, to the same weights in float64, on fewer tokens.
"""

import argparse
import copy
import gc
import json
import multiprocessing
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.environment import environment
from benchmarks.timing import synchronize, wall_ms
from lightning_liger import apply_liger_kernels

_GQA = {"num_attention_heads": 32, "num_key_value_heads": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3 8B": ("llama", {**_GQA, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}),
    "Qwen3 8B": (
        "qwen3",
        {**_GQA, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128, "vocab_size": 151936},
    ),
    "Gemma 3 4B": (
        "gemma3_text",
        {"hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4,
         "head_dim": 256, "vocab_size": 262208, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Mistral 7B": ("mistral", {**_GQA, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32768}),
    "Phi-3 mini": (
        "phi3",
        {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 32,
         "vocab_size": 32064},
    ),
    "GLM-4 9B": (
        "glm4",
        {"hidden_size": 4096, "intermediate_size": 13696, "num_attention_heads": 32, "num_key_value_heads": 2,
         "head_dim": 128, "vocab_size": 151552},
    ),
    "OLMo 2 7B": (
        "olmo2",
        {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32,
         "vocab_size": 100352},
    ),
    "Granite 3 8B": (
        "granite",
        {**_GQA, "hidden_size": 4096, "intermediate_size": 12800, "vocab_size": 49155, "logits_scaling": 16.0,
         "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0078125},
    ),
    "Mixtral, narrow experts": (
        "mixtral",
        {**_GQA, "hidden_size": 4096, "intermediate_size": 3584, "vocab_size": 32000, "num_local_experts": 8},
    ),
    "Bamba 9B": (
        "bamba",
        {**_GQA, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "attn_layer_indices": [1]},
    ),
}  # fmt: skip
_SMALL = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 500, "head_dim": 16, "mamba_n_heads": 8}


def _patch_by_liger_kernel(model: nn.Module) -> None:
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)


ARMS: dict[str, Callable[[nn.Module], Any]] = {
    "unpatched": lambda model: None,
    "ours": apply_liger_kernels,
    "liger-kernel": _patch_by_liger_kernel,  # last: its changes cannot be undone
}


def _gradients(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    loss = model(**batch).loss
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return loss.detach(), gradients


def _distance(actual: list[Tensor], exact: list[Tensor]) -> float:
    pairs = [(got, want) for got, want in zip(actual, exact, strict=True) if want is not None]
    error = sum(((got.double() - want).square().sum() for got, want in pairs))
    return (error / sum(want.square().sum() for _, want in pairs)).sqrt().item()


def measure(name: str, quick: bool, device: torch.device) -> list[dict[str, Any]]:
    """Records of one model, one for each arm."""
    model_type, settings = MODELS[name]
    if quick:
        settings = {key: _SMALL.get(key, value) for key, value in settings.items()}
        settings |= {"num_attention_heads": 4, "num_key_value_heads": 2} | {"mamba_n_heads": 8, "mamba_d_head": 16}
    config = AutoConfig.for_model(
        model_type, num_hidden_layers=2, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2, **settings
    )
    batch_size, seq_len = (2, 16) if quick else (4, 2048)
    if model_type == "bamba" and not quick:
        batch_size, seq_len = 1, 512  # its fallback without the mamba package makes tensors of 64 GiB at 2048
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, config.vocab_size, (batch_size, seq_len), generator=generator).to(device)
    batch = {
        "input_ids": ids,
        "labels": ids.masked_fill(torch.rand(ids.shape, generator=generator).to(device) < 0.1, -100),
    }
    few = {key: value[:1, : 16 if quick else 512] for key, value in batch.items()}
    torch.manual_seed(0)
    with device:
        original = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    in_double = copy.deepcopy(original).double()
    in_double.config._experts_implementation = "eager"  # grouped products have no float64
    exact_loss, exact = _gradients(in_double, few)
    del in_double
    records = []
    for arm, patch in ARMS.items():
        model = copy.deepcopy(original).train()
        try:
            report = patch(model)
            loss, gradients = _gradients(model, few)
        except (ImportError, RuntimeError, TypeError, ValueError) as failure:
            if arm != "liger-kernel":  # liger-kernel does not support or run every model
                raise
            print(f"{name}, {arm}: skipped, {failure}")
            continue
        error = _distance(gradients, exact)
        del gradients

        def once(model: nn.Module = model) -> None:
            model(**batch).loss.backward()
            model.zero_grad()

        once()
        gc.collect()
        peak = None
        if device.type == "cuda":
            torch.cuda.empty_cache()
            synchronize(device)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            once()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        milliseconds = wall_ms([once], 3 if quick else 10, device)
        records.append(
            {
                "model": name,
                "model_type": model_type,
                "tokens": ids.numel(),
                "arm": arm,
                "step_ms": statistics.median(milliseconds),
                "step_ms_samples": milliseconds,
                "peak_mib": peak,
                "gradient_error": error,
                "loss_error": abs((loss.double() - exact_loss).item() / exact_loss.item()),
                "replaced": report.as_dict() if arm == "ours" else None,
            }
        )
        del model
    return records


def _table(records: list[dict[str, Any]]) -> Table:
    table = Table(title="A step of two layers and the loss, forward and backward", title_justify="left")
    for column in ("model", "arm", "step ms", "speed", "peak MiB", "memory", "gradient error", "loss error"):
        table.add_column(column, justify="left" if column in ("model", "arm") else "right")
    for record in records:
        plain = next(other for other in records if other["model"] == record["model"])
        memory = record["peak_mib"]
        table.add_row(
            record["model"] if record is plain else "",
            record["arm"],
            f"{record['step_ms']:.2f}",
            f"{plain['step_ms'] / record['step_ms']:.2f}x",
            "-" if memory is None else f"{memory:,.0f}",
            "-" if memory is None else f"{memory / plain['peak_mib']:.2f}x",
            f"{record['gradient_error']:.2e}",
            f"{record['loss_error']:.1e}",
        )
    return table


def main() -> None:
    """Measures, writes records and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where to write the records, as JSON")
    parser.add_argument("--only", default=",".join(MODELS), help="comma separated names of models (default: all)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few repeats: a trial that runs on a CPU")
    options = parser.parse_args()
    names = [name for name in MODELS if name in options.only]
    if not names:
        parser.error(f"--only takes names out of {list(MODELS)}, got {options.only!r}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    records: list[dict[str, Any]] = []
    for name in names:
        # In a separate process: liger-kernel's changes are for every model of the process.
        with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as process:
            records += process.submit(measure, name, options.quick, device).result()
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"environment": environment(), "records": records}, indent=1))
    Console(width=120).print(_table(records))


if __name__ == "__main__":
    main()
