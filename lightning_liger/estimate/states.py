"""Weights, gradients and the optimizer's states: how many bytes of them each GPU has."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from liger_ops.arguments import check_choice, check_integer, wrong_value


class Sharding(NamedTuple):
    """What a strategy shards over the GPUs."""

    title: str
    weights: bool = False
    gradients: bool = False
    optimizer: bool = False
    joins_gradients: bool = False
    """Whether a second buffer holds all gradients (DDP's buckets)."""
    has_master_weights: bool = False
    """Whether the optimizer has weights in float32 of its own, also where the model trains in 16 bits."""
    bucket_bytes: int = 0
    """Of buffers in which gradients are reduced."""
    casts_weights: bool = False
    """Whether mixed precision casts whole weights, not the arguments of operations."""
    frees_early: bool = False
    """Whether the last step's gradients are freed before the next forward without us too."""


_DEEPSPEED_BUCKETS = 2 * 200_000_000 * 2
"""Two buckets of Lightning's default size in 16 bits, of which one fills while the other is reduced."""

STRATEGIES = {
    "single": Sharding("one GPU"),
    "ddp": Sharding("DDP", joins_gradients=True),
    "fsdp": Sharding("FSDP", True, True, True, casts_weights=True),
    "fsdp2": Sharding("FSDP2", True, True, True, casts_weights=True),
    "deepspeed_stage_1": Sharding(
        "DeepSpeed ZeRO stage 1",
        optimizer=True,
        has_master_weights=True,
        casts_weights=True,
        bucket_bytes=_DEEPSPEED_BUCKETS,
        frees_early=True,
    ),
    "deepspeed_stage_2": Sharding(
        "DeepSpeed ZeRO stage 2",
        False,
        True,
        True,
        has_master_weights=True,
        casts_weights=True,
        bucket_bytes=_DEEPSPEED_BUCKETS,
        frees_early=True,
    ),
    "deepspeed_stage_3": Sharding(
        "DeepSpeed ZeRO stage 3",
        True,
        True,
        True,
        has_master_weights=True,
        casts_weights=True,
        bucket_bytes=_DEEPSPEED_BUCKETS,
        frees_early=True,
    ),
}
"""The strategies of ``lightning-liger inspect``."""


class Precision(NamedTuple):
    """The dtypes of a precision of Lightning's."""

    compute: torch.dtype
    weights: torch.dtype

    @property
    def is_mixed(self) -> bool:
        return self.compute != self.weights


PRECISIONS = {
    "bf16-true": Precision(torch.bfloat16, torch.bfloat16),
    "16-true": Precision(torch.float16, torch.float16),
    "32-true": Precision(torch.float32, torch.float32),
    "bf16-mixed": Precision(torch.bfloat16, torch.float32),
    "16-mixed": Precision(torch.float16, torch.float32),
}
"""The precisions, by Lightning's names."""


class Optimizer(NamedTuple):
    """The states of an optimizer."""

    num_states: int
    """How many tensors of a parameter's size it keeps."""
    num_temporaries: int = 0
    """How many its step makes for a moment."""


OPTIMIZERS = {
    "adamw": Optimizer(2),
    "adamw_foreach": Optimizer(2, 1),
    "sgd": Optimizer(0),
    "sgd_momentum": Optimizer(1),
}
"""The optimizers: ``adamw`` is PyTorch's with ``fused=True``, ``adamw_foreach`` its default."""


@dataclass(frozen=True)
class States:
    """The bytes on each GPU.

    Attributes:
        weight_bytes: Of weights between their uses.
        optimizer_bytes: Of the optimizer's states and float32 weights, if there are any besides the model's.
        step_bytes: What the optimizer's step makes for a moment.
        bucket_bytes: Of gradients in buckets.
        gathers: Whether weights are gathered for their use.
        reduces: Whether a layer's gradients are reduced to a shard when its backward ends.
        bytes_of_gradient: Of one number in what is kept of gradients.
        num_shards: Over how many GPUs gradients are sharded.
    """

    weight_bytes: int
    optimizer_bytes: int
    step_bytes: int
    bucket_bytes: int
    gathers: bool
    reduces: bool
    bytes_of_gradient: int
    num_shards: int

    def totals(self, model: nn.Module) -> dict[str, int]:
        """The bytes of weights, gradients and the optimizer, by these names."""
        trained = [each for each in model.parameters() if each.requires_grad]
        gradients = self.gradient_bytes(trained) + self.bucket_bytes
        return {"weights": self.weight_bytes, "gradients": gradients, "optimizer": self.optimizer_bytes}

    def gradient_bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """What is kept of the gradients of these parameters."""
        return sum(-(-each.numel() // self.num_shards) for each in parameters) * self.bytes_of_gradient


def check_choices(strategy: str, num_gpus: int, precision: str, optimizer: str) -> None:
    """Raises for names that are in none of the tables, and for numbers of GPUs and precisions that do not fit.

    Raises:
        ValueError: Naming the known ones.
    """
    check_choice("strategy", strategy, tuple(STRATEGIES))
    check_choice("precision", precision, tuple(PRECISIONS))
    check_choice("optimizer", optimizer, tuple(OPTIMIZERS))
    check_integer("num_gpus", num_gpus, at_least=1)
    if strategy == "single" and num_gpus > 1:
        raise wrong_value("num_gpus", "1 for strategy 'single'", num_gpus)
    if PRECISIONS[precision].is_mixed and not STRATEGIES[strategy].casts_weights:
        casting = ", ".join(name for name, each in STRATEGIES.items() if each.casts_weights)
        raise wrong_value(
            "precision", f"without autocast, as 'bf16-true', or of a strategy that casts weights ({casting})", precision
        )


def states_of(
    model: nn.Module,
    strategy: str = "single",
    num_gpus: int = 1,
    precision: str = "bf16-true",
    optimizer: str = "adamw",
) -> States:
    """The bytes of a model's weights, gradients and optimizer on each GPU.

    Args:
        model: Its parameters tell the numbers; those that require no gradient have neither gradients nor states.
        strategy: A name in :data:`STRATEGIES`.
        num_gpus: At least 1; 1 for ``"single"``.
        precision: A name in :data:`PRECISIONS`.
        optimizer: A name in :data:`OPTIMIZERS`.

    Raises:
        ValueError: For other names, and for numbers of GPUs that do not fit.
    """
    check_choices(strategy, num_gpus, precision, optimizer)
    sharding, dtypes, kind = STRATEGIES[strategy], PRECISIONS[precision], OPTIMIZERS[optimizer]
    parameters = list(model.parameters())
    total = sum(each.numel() for each in parameters)
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    size, full = dtypes.weights.itemsize, torch.float32.itemsize
    has_master = sharding.has_master_weights and dtypes.compute.itemsize < full
    if has_master:
        size = dtypes.compute.itemsize

    def share(number: int, is_sharded: bool) -> int:
        return -(-number // num_gpus) if is_sharded else number

    own = share(trained, sharding.optimizer)
    state_size = full if has_master else size
    return States(
        weight_bytes=share(total, sharding.weights) * size,
        optimizer_bytes=own * (kind.num_states * state_size + (full if has_master else 0)),
        step_bytes=own * (kind.num_temporaries * state_size + (full if has_master else 0)),
        bucket_bytes=trained * size if sharding.joins_gradients else sharding.bucket_bytes,
        gathers=sharding.weights and num_gpus > 1,
        reduces=sharding.gradients and num_gpus > 1,
        bytes_of_gradient=size,
        num_shards=num_gpus if sharding.gradients else 1,
    )
