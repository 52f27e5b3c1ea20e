"""Trainings of whole models and of some with frozen parts, under every engine that ``test_frozen.py`` compares."""

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn

from lightning_liger import LazyLogits
from tests.lightning_liger.strategies.workers.clipping import whole_parameters
from tests.lightning_liger.strategies.workers.distributed import (
    NUM_RANKS,
    AddsToLoss,
    Batch,
    build_model,
    make_batches,
    make_optimizer,
    make_uneven_batches,
    regularized,
)
from tests.lightning_liger.strategies.workers.engines import ENGINES, fit

NUM_BATCHES = 8
NUM_MICRO_BATCHES = 2
MAX_NORM = 0.2
"""Below the norm in every step of the tests."""
OFFLOAD = "liger_fsdp_cpu_offload"


def _whole(model: nn.Module) -> nn.Module:
    return model


def _head_only(model: nn.Module) -> nn.Module:
    model.model.requires_grad_(False)
    return model


def _without_head(model: nn.Module) -> nn.Module:
    model.lm_head.requires_grad_(False)
    return model


def _mixed(model: nn.Module) -> nn.Module:
    """Frozen and trained parameters side by side, in each layer and around them."""
    model.model.embed_tokens.requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.requires_grad_(False)
    return model


def _with_adapters(*layers: str) -> Callable[[nn.Module], nn.Module]:
    def change(model: nn.Module) -> nn.Module:
        from peft import LoraConfig, get_peft_model

        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(8)
            # With the usual zeros in one of its factors, the other would get no gradient in the first step.
            return get_peft_model(model, LoraConfig(r=4, target_modules=list(layers), init_lora_weights=False))

    return change


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "whole": _whole,
    "tied": _whole,
    "head-only": _head_only,
    "without-head": _without_head,
    "mixed": _mixed,
    "lora-attention": _with_adapters("q_proj", "v_proj"),
    "lora-head": _with_adapters("q_proj", "lm_head"),
}
HAS_PEFT = importlib.util.find_spec("peft") is not None
RUNS = [
    *((engine, change) for engine in ENGINES for change in CHANGES),
    (OFFLOAD, "whole"),
    (OFFLOAD, "lora-head"),
]
"""Those with adapters only where PEFT is installed."""


class Changed(AddsToLoss):
    """The tiny model with a change of ``CHANGES``; notes whether a loss needed the gradient of the head's weight.

    Its user adds to the loss of each micro-batch, and has a hook without ``super()``.
    """

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.head_needs_gradient: set[bool] = set()

    def configure_model(self) -> None:
        if getattr(self, "model", None) is None:
            self.model = build_changed(self.change)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(trained(self))

    def lm_loss_with_counts(self, logits: LazyLogits | Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(logits, LazyLogits):
            self.head_needs_gradient.add(logits.head.weight.requires_grad)
        return super().lm_loss_with_counts(logits, *args, **kwargs)


def build_changed(change: str) -> nn.Module:
    return CHANGES[change](build_model(change == "tied"))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class Reference(NamedTuple):
    """The losses of each rank's batches, norms before clipping, parameters in the end."""

    losses: list[list[float]]
    norms: list[float]
    parameters: dict[str, Tensor]


def reference_training(
    change: str,
    device: str,
    of_tokens: bool = True,
    make: Callable[[int, int], list[Batch]] = make_uneven_batches,
    num_micro_batches: int = NUM_MICRO_BATCHES,
) -> Reference:
    """One process, stock model, plain loop; the mean is over a step's tokens, or over the means of its batches."""
    model = build_changed(change).to(device)
    optimizer = make_optimizer(trained(model))
    batches = [make(rank, NUM_BATCHES) for rank in range(NUM_RANKS)]
    losses: list[list[float]] = [[] for _ in range(NUM_RANKS)]
    norms = []
    for start in range(0, NUM_BATCHES, num_micro_batches):
        optimizer.zero_grad()
        window = [
            (rank, batch) for rank in range(NUM_RANKS) for batch in batches[rank][start : start + num_micro_batches]
        ]
        counts = [int((batch["labels"][:, 1:] != -100).sum()) for _, batch in window]
        for (rank, batch), count in zip(window, counts, strict=True):
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
            loss = regularized(loss) if of_tokens else loss
            losses[rank].append(loss.item() if count else 0.0)
            if count:
                (loss * (count / sum(counts) if of_tokens else 1 / len(window))).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained(model), MAX_NORM).item())
        optimizer.step()
    return Reference(losses, norms, {name: parameter.detach().cpu() for name, parameter in model.named_parameters()})


def results(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a rank got out of each of ``RUNS``, and of offloading with Fabric."""
    found = {}
    for engine, change in RUNS:
        if "lora" in change and not HAS_PEFT:
            continue
        module = Changed(change)
        batches = make_uneven_batches(run["rank"], NUM_BATCHES)
        options = {"accumulate_grad_batches": NUM_MICRO_BATCHES, "gradient_clip_val": MAX_NORM}
        result = fit(run, engine, module, batches, **options)
        result["head_needs_gradient"] = module.head_needs_gradient
        if engine == OFFLOAD:
            result["trainer"].save_checkpoint(run["folder"] / f"{engine}-{change}.ckpt")
        found[f"{engine}-{change}"] = result
    found[f"fabric-{OFFLOAD}"] = _offload_with_fabric(run)
    return found


def _offload_with_fabric(run: dict[str, Any]) -> dict[str, Any]:
    fabric = L.Fabric(strategy=OFFLOAD, accelerator=run["accelerator"], devices=NUM_RANKS)
    fabric.launch()
    model = fabric.setup_module(build_model())
    optimizer = fabric.setup_optimizers(make_optimizer(model.parameters()))
    losses, norms = [], []
    for batch in make_batches(run["rank"], NUM_BATCHES):
        optimizer.zero_grad()
        loss = model(**{name: tensor.to(fabric.device) for name, tensor in batch.items()}).loss
        fabric.backward(loss)
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM).item())
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "whole": whole_parameters(model._forward_module)}
