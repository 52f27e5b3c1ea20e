"""Buffers of Hugging Face models in a half precision: in the dtypes that ``from_pretrained`` would give them.

Lightning casts every buffer with the parameters: a rotary embedding's ``inv_freq`` in bfloat16 turns distant positions
by wrong angles. A model that was made in its precision, as in ``configure_model``, has the right dtypes already, but
for what is loaded in float32. In one that was made in float32 the buffers stay in float32 that models ask to have in
it. Both are known by their names.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from lightning_liger.sequences.context_parallel import outermost_models

_HALF = (torch.bfloat16, torch.float16)
_FLOAT32 = (
    *("inv_freq", "embed_positions", "pos_encoding"),  # angles
    *("e_score_correction_bias", "expert_bias", "balancing_biases"),  # of routers
    *("global_mean", "global_invstd"),  # of sound
)
"""The ends of the names of these buffers."""


def convert_as_pretrained(plugin: Any, module: Module) -> Module:
    """``module`` cast by a precision plugin, but for some buffers of Hugging Face models."""
    with buffers_as_pretrained(module):
        return type(plugin).convert_module(plugin, module)


@contextmanager
def buffers_as_pretrained(module: Module) -> Iterator[None]:
    """Gives the buffers of each Hugging Face model in ``module``, which the block casts, their dtypes.

    Values are those before the block, never rounded and cast back.
    """
    before = [(model, _dtype(model), list(_buffers(model))) for model in outermost_models(module)]
    yield
    for model, dtype_before, buffers in before:
        dtype = _dtype(model)
        if dtype not in _HALF:
            continue
        for owner, name, buffer in buffers:
            cast = getattr(owner, name)
            kept = buffer.dtype if dtype == dtype_before else cast.dtype
            wanted = torch.float32 if name.endswith(_FLOAT32) else kept
            if cast.dtype != wanted:
                setattr(owner, name, buffer.to(cast.device, wanted))


def _dtype(model: PreTrainedModel) -> torch.dtype | None:
    return next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), None)


def _buffers(model: Module) -> Iterator[tuple[Module, str, Tensor]]:
    for owner in model.modules():
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            if buffer.is_floating_point():
                yield owner, name, buffer
