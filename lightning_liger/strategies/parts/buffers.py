"""Buffers of Hugging Face models in a half precision: in the dtypes that ``from_pretrained`` would give them.

Lightning casts every buffer with the parameters: a rotary embedding's ``inv_freq`` in bfloat16 turns distant positions
by wrong angles. ``from_pretrained(dtype=torch.bfloat16)`` makes the model while that is torch's default dtype, so a
buffer that asks for float32 keeps it and others, such as BatchNorm's statistics, are made in bfloat16; and it loads
some in float32 whatever they were (``_keep_in_fp32_modules``).
"""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from lightning_liger.sequences.context_parallel import outermost_models

_HALF = (torch.bfloat16, torch.float16)


@contextmanager
def buffers_as_pretrained(module: Module) -> Iterator[None]:
    """Gives the buffers of each Hugging Face model in ``module``, which the block casts, their dtypes.

    Values are those before the block, never rounded and cast back. Warns where it cannot tell the dtypes.
    """
    before = [(model, _dtype(model), _buffers(model)) for model in outermost_models(module)]
    yield
    for model, dtype_before, buffers in before:
        dtype = _dtype(model)
        if dtype not in _HALF:
            continue
        if dtype == dtype_before:  # made in it, as in configure_model, so its buffers have these dtypes
            dtypes = {name: buffer.dtype for name, (_, buffer) in buffers.items()}
        else:
            dtypes = _dtypes_when_made_in(dtype, model)
        for name, wanted in (dtypes | _dtypes_when_loaded_in(dtype, model, buffers)).items():
            owner, buffer = buffers.get(name, (None, None))
            key = name.rpartition(".")[2]
            cast = None if owner is None else owner._buffers.get(key)
            if owner is not None and buffer is not None and cast is not None and cast.dtype != wanted:
                owner._buffers[key] = buffer.to(cast.device, wanted)


def _dtype(model: PreTrainedModel) -> torch.dtype | None:
    return next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), None)


def _buffers(model: Module) -> dict[str, tuple[Module, Tensor]]:
    """The floating-point buffers by name, each with the module that holds it."""
    named = model.named_buffers(remove_duplicate=False)
    return {
        name: (model.get_submodule(name.rpartition(".")[0]), buffer)
        for name, buffer in named
        if buffer.is_floating_point()
    }


def _dtypes_when_made_in(dtype: torch.dtype, model: PreTrainedModel) -> dict[str, torch.dtype]:
    """The dtypes of buffers in a model of the same configuration that is made in ``dtype``."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            twin = type(model)(copy.deepcopy(model.config))
    except Exception as error:  # whatever the constructor of a user's class raises
        rank_zero_warn(
            f"{type(model).__name__}: its buffers were cast to {dtype} with its parameters, because it could not be"
            f" made again on the meta device to see which ones ask for float32 ({type(error).__name__}: {error}). Make"
            " it in configure_model, or inside fabric.init_module(), to keep those in float32"
        )
        return {}
    finally:
        torch.set_default_dtype(default)
    return {name: buffer.dtype for name, (_, buffer) in _buffers(twin).items()}


def _dtypes_when_loaded_in(
    dtype: torch.dtype, model: PreTrainedModel, buffers: dict[str, tuple[Module, Tensor]]
) -> dict[str, torch.dtype]:
    """The dtypes of those buffers that ``from_pretrained`` loads in another dtype than the model's."""
    # Private to transformers: what its from_pretrained asks, too. The keys are patterns with * for any text.
    plan = {re.compile(key.replace("*", ".*")): value for key, value in model._get_dtype_plan(dtype).items()}
    return {
        name: value
        for name, (owner, _) in buffers.items()
        if name.rpartition(".")[2] not in owner._non_persistent_buffers_set  # the others are not loaded
        for pattern, value in plan.items()
        if pattern.search(name)
    }
