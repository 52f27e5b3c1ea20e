"""Checks of quantized weights, whose packed bits must be sharded as they are, or not at all."""

from typing import Any

import torch
from torch.nn import Module, Parameter

from liger_ops.arguments import wrong_value


def packed_parameters(model: Module) -> list[Parameter]:
    """Those of bitsandbytes in 4 bits."""
    return [parameter for parameter in model.parameters() if hasattr(parameter, "quant_state")]


def whole_parameters(model: Module) -> set[Parameter]:
    """Frozen ones that ``model`` tells DDP to ignore, as LigerCausalLM those of torchao: FSDP2 does not shard them."""
    names = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    return {each for name, each in model.named_parameters() if name in names and not each.requires_grad}


def check_flattened(model: Module, mixed_precision: Any) -> None:
    """Raises ValueError if FSDP would round the bits of packed parameters to another dtype, or lacks some."""
    dtype: torch.dtype | None = getattr(mixed_precision, "param_dtype", None)
    for parameter in packed_parameters(model):
        if dtype not in (None, parameter.dtype):
            raise ValueError(
                f"FSDP would round the bits of 4-bit weights, stored as {parameter.dtype}, to {dtype}: use precision"
                " 'bf16-true', '16-true' or '32-true', or strategy='liger_model_parallel'"
            )
    _check_complete(model)


def check_split(model: Module, **sizes: int) -> None:
    """Raises ValueError if ranks would split layers whose weights are quantized, or lack some bits."""
    for name, size in sizes.items():
        if size > 1 and (packed_parameters(model) or whole_parameters(model)):
            raise wrong_value(name, "1 with quantized weights, which have no rows to split", size)
    _check_complete(model)


def _check_complete(model: Module) -> None:
    for parameter in packed_parameters(model):
        state: Any = getattr(parameter, "quant_state", None)
        if state is not None and state.shape.numel() > 2 * parameter.nbytes:  # the rest does not fill an element
            raise ValueError(
                f"a 4-bit weight of shape {tuple(state.shape)} does not fill elements of {parameter.dtype}: use"
                " strategy='liger_model_parallel' with bnb_4bit_quant_storage='uint8' and torch 2.13 or later"
            )
