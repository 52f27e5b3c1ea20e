"""Weights, gradients and the optimizer's states: how many bytes of them each GPU has."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import nn

from liger_ops.arguments import check_choice, wrong_value
from liger_ops.fp8.weights import Float8Weight
from liger_ops.optim.moments import dtype_of, zeros
from lightning_liger.activations.layers import find_layers
from lightning_liger.training.causal_lm import needs_float32_moments

StrategyName = Literal["single", "ddp", "fsdp", "fsdp2", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
PrecisionName = Literal["bf16-true", "16-true", "32-true", "bf16-mixed", "16-mixed"]
OptimizerName = Literal["adamw", "adamw_foreach", "adamw_bfloat16", "adamw_8bit", "sgd", "sgd_momentum"]


class Sharding(NamedTuple):
    """What a strategy shards over the GPUs."""

    title: str
    weights: bool = False
    gradients: bool = False
    optimizer: bool = False
    joins_gradients: bool = False
    """Whether a second buffer holds all gradients (DDP's buckets)."""
    casts_weights: bool = False
    """Whether mixed precision casts whole weights, not the arguments of operations."""
    frees_early: bool = False
    """Whether the last step's gradients are freed before the next forward without us too."""
    flattens: bool = False
    """Whether a layer is one parameter, so that frozen parameters next to trained ones have gradients (FSDP1)."""
    zero_stage: int = 0
    """Of DeepSpeed, whose optimizer has other weights in float32 in every precision; 0 for other strategies."""


_BUCKET_SIZE = 200_000_000
"""Numbers in a buffer in which DeepSpeed reduces gradients, by default of Lightning."""
_MAX_LIVE_PARAMETERS = 1_000_000_000
"""Numbers in the weights that ZeRO stage 3 keeps gathered from forward to backward, by default of DeepSpeed."""


# Stage 1 reduces gradients to shards too, since Lightning sets contiguous_gradients and overlap_comm.
_ZERO = Sharding("DeepSpeed ZeRO stage 1", False, True, True, casts_weights=True, frees_early=True, zero_stage=1)
STRATEGIES = {
    "single": Sharding("one GPU"),
    "ddp": Sharding("DDP", joins_gradients=True),
    "fsdp": Sharding("FSDP", True, True, True, casts_weights=True, flattens=True),
    "fsdp2": Sharding("FSDP2", True, True, True),
    "deepspeed_stage_1": _ZERO,
    "deepspeed_stage_2": _ZERO._replace(title="DeepSpeed ZeRO stage 2", zero_stage=2),
    "deepspeed_stage_3": _ZERO._replace(title="DeepSpeed ZeRO stage 3", weights=True, zero_stage=3),
}
"""The strategies of ``lightning-liger inspect``."""


class Precision(NamedTuple):
    """The dtypes of a precision of Lightning's."""

    compute: torch.dtype
    weights: torch.dtype


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
    state_dtype: Literal["bfloat16", "8bit"] | None = None
    """Of its states, as ``LigerCausalLM`` takes it."""


OPTIMIZERS = {
    "adamw": Optimizer(2),
    "adamw_foreach": Optimizer(2, 1),
    "adamw_bfloat16": Optimizer(2, state_dtype="bfloat16"),
    "adamw_8bit": Optimizer(2, state_dtype="8bit"),
    "sgd": Optimizer(0),
    "sgd_momentum": Optimizer(1),
}
"""The optimizers: ``adamw`` is PyTorch's with ``fused=True``, ``adamw_foreach`` its default; those with a dtype are
:class:`~liger_ops.optim.AdamW` with that ``state_dtype``."""


@dataclass(frozen=True)
class States:
    """The bytes on each GPU.

    Attributes:
        sharding: What the strategy shards; nothing over one GPU.
        weight_bytes: Of weights between their uses.
        gathered_bytes: Of weights that are gathered from forward to the end of backward, besides those of a layer.
        optimizer_bytes: Of the optimizer's states and float32 weights, if there are any besides the model's.
        step_bytes: What the optimizer's step makes for a moment.
        bucket_bytes: Of gradients in buckets.
        backward_bytes: Of buckets that exist in backward only.
        bytes_of_gradient: Of one number in what is kept of gradients.
    """

    sharding: Sharding
    num_gpus: int
    weight_bytes: int
    gathered_bytes: int
    optimizer_bytes: int
    step_bytes: int
    bucket_bytes: int
    backward_bytes: int
    bytes_of_gradient: int

    def totals(self, model: nn.Module) -> dict[str, int]:
        """The bytes of weights, gradients and the optimizer, by these names."""
        trained = dict.fromkeys(each for unit in units_of(model) for each in self.trained(unit))
        gradients = self.gradient_bytes(trained) + self.bucket_bytes
        return {"weights": self.weight_bytes, "gradients": gradients, "optimizer": self.optimizer_bytes}

    def trained(self, unit: list[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters that have gradients, of a layer or of all others."""
        own = [each for each in unit if each.requires_grad]
        return unit if own and self.sharding.flattens else own

    def gradient_bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """What is kept of the gradients of these parameters."""
        num_shards = self.num_gpus if self.sharding.gradients else 1
        return sum(-(-each.numel() // num_shards) for each in parameters) * self.bytes_of_gradient


def units_of(model: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of each layer, and all others."""
    units = [list(layer.parameters()) for layer in find_layers(model)]
    inside = set(chain.from_iterable(units))
    return [*units, [each for each in model.parameters() if each not in inside]]


def check_choices(strategy: str, num_gpus: int, precision: str, optimizer: str) -> None:
    """Raises ValueError for names that are in none of the tables, and for what does not fit the strategy."""
    check_choice("strategy", strategy, tuple(STRATEGIES))
    check_choice("precision", precision, tuple(PRECISIONS))
    check_choice("optimizer", optimizer, tuple(OPTIMIZERS))
    if strategy == "single" and num_gpus > 1:
        raise wrong_value("num_gpus", "1 for strategy 'single'", num_gpus)
    if STRATEGIES[strategy].zero_stage and OPTIMIZERS[optimizer].state_dtype:
        raise wrong_value("optimizer", "one with states of DeepSpeed's own dtype", optimizer)
    is_mixed = PRECISIONS[precision].compute != PRECISIONS[precision].weights
    if is_mixed and not STRATEGIES[strategy].casts_weights:
        casting = ", ".join(name for name, each in STRATEGIES.items() if each.casts_weights)
        expected = f"without autocast, as 'bf16-true', or of a strategy that casts weights ({casting})"
        raise wrong_value("precision", expected, precision)


def _moment_bytes(model: nn.Module, state_dtype: str) -> list[int]:
    """The bytes of a moment of each trained parameter, as ``LigerCausalLM`` sets up AdamW."""
    sizes = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and parameter not in sizes:
                is_wide = state_dtype == "8bit" and needs_float32_moments(module)
                dtype = dtype_of(parameter, "float32" if is_wide else state_dtype)
                sizes[parameter] = sum(each.nbytes for each in zeros(parameter, "exp_avg", dtype).values())
    return list(sizes.values())


def states_of(
    model: nn.Module,
    strategy: str = "single",
    num_gpus: int = 1,
    precision: str = "bf16-true",
    optimizer: str = "adamw",
) -> States:
    """The bytes of a model's weights, gradients and optimizer on each GPU."""
    sharding, dtypes, kind = STRATEGIES[strategy], PRECISIONS[precision], OPTIMIZERS[optimizer]
    if num_gpus == 1:
        sharding = sharding._replace(weights=False, gradients=False, optimizer=False, flattens=False)
    held = [each for each in model.parameters() if isinstance(each, Float8Weight)]
    total = sum(each.numel() for each in model.parameters())
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    stage, full = sharding.zero_stage, torch.float32.itemsize
    size = (dtypes.compute if stage else dtypes.weights).itemsize

    def share(number: int, is_sharded: bool) -> int:
        return -(-number // num_gpus) if is_sharded else number

    own = share(trained, sharding.optimizer)
    state_bytes = own * kind.num_states * (full if stage else size)
    if kind.state_dtype:
        state_bytes = kind.num_states * sum(
            share(number, sharding.optimizer) for number in _moment_bytes(model, kind.state_dtype)
        )
    bucket_bytes = backward_bytes = 0
    step_bytes = own * kind.num_temporaries * size
    if stage:
        # The shard is joined, cast to float32, and freed in stages 1 and 2, before the optimizer makes temporaries.
        joined = own * (size + (full if size < full else 0))
        freed = 0 if stage == 3 else own * size
        step_bytes = max(joined, own * full * (1 + kind.num_temporaries) - freed)
        bucket = _BUCKET_SIZE * size
        copied = min(_BUCKET_SIZE, trained) * size  # of a bucket, in the order of the ranks
        bucket_bytes, backward_bytes = (bucket, copied) if stage == 3 else (0, 2 * bucket + copied)
    elif sharding.joins_gradients:
        bucket_bytes = trained * size
    return States(
        sharding,
        num_gpus,
        weight_bytes=share(total - sum(each.numel() for each in held), sharding.weights) * size
        + sum(part.nbytes for each in held for part in each.parts),
        gathered_bytes=min(total, _MAX_LIVE_PARAMETERS) * size if stage and sharding.weights else 0,
        optimizer_bytes=state_bytes + (own * full if stage else 0),
        step_bytes=step_bytes,
        bucket_bytes=bucket_bytes,
        backward_bytes=backward_bytes,
        bytes_of_gradient=size,
    )
