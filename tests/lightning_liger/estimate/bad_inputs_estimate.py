"""Wrong arguments of the estimate, and what users must see."""

from pathlib import Path
from typing import Any

from lightning_liger.estimate import inspect_model
from tests.bad_inputs import BadInput


def _inspect(model: Any = "llama", **arguments: Any) -> Any:
    return lambda: inspect_model(model, **arguments)


def _without_config(tmp_path: Path) -> None:
    inspect_model(str(tmp_path))


BAD_INPUTS = [
    BadInput("inspect-model-unknown", _inspect("lama"), ("model", "'lama'", "did you mean 'llama'"), FileNotFoundError),
    BadInput("inspect-model-name", _inspect("no/such-model"), ("model", "'no/such-model'", "cache"), FileNotFoundError),
    BadInput("inspect-model-folder", _without_config, ("model", "config.json"), FileNotFoundError),
    BadInput("inspect-model-type", _inspect(3), ("model", "3")),
    BadInput("inspect-model-encoder", _inspect("vit"), ("model_type", "'vit'", "causal")),
    BadInput("inspect-config-name", _inspect(config={"hiden_size": 1}), ("config", "hiden_size", "hidden_size")),
    BadInput("inspect-batch_size-zero", _inspect(batch_size=0), ("batch_size", "0", "at least 1")),
    BadInput("inspect-seq_len-float", _inspect(seq_len=2.5), ("seq_len", "2.5", "integer")),
    BadInput("inspect-num_gpus-negative", _inspect(num_gpus=-1), ("num_gpus", "-1", "at least 1")),
    BadInput("inspect-num_gpus-single", _inspect(num_gpus=2, strategy="single"), ("num_gpus", "2", "single")),
    BadInput("inspect-strategy-unknown", _inspect(strategy="fsdp3"), ("strategy", "'fsdp3'", "did you mean 'fsdp")),
    BadInput("inspect-precision-unknown", _inspect(precision="bf16"), ("precision", "'bf16'", "bf16-true")),
    BadInput("inspect-precision-autocast", _inspect(precision="bf16-mixed"), ("precision", "bf16-mixed", "fsdp")),
    BadInput("inspect-optimizer-unknown", _inspect(optimizer="adam"), ("optimizer", "'adam'", "adamw")),
    BadInput("inspect-gpu-unknown", _inspect(gpu="h100"), ("gpu", "'h100'", "did you mean 'h100-80gb'")),
    BadInput("inspect-memory_budget-word", _inspect(memory_budget="most"), ("memory_budget", "'most'", "auto")),
    BadInput("inspect-memory_budget-share", _inspect(memory_budget=0.5), ("memory_budget", "0.5", "gpu")),
    BadInput("inspect-memory_budget-zero", _inspect(memory_budget=0.0), ("memory_budget", "0.0", "above 0")),
    BadInput(
        "inspect-memory_budget-large",
        _inspect(memory_budget=100, gpu="h100-80gb"),
        ("memory_budget", "100", "at most 79.1 GiB"),
    ),
    BadInput("inspect-lora-type", _inspect(lora=3), ("lora", "3", "dict")),
]
