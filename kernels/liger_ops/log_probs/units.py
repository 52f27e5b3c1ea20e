"""Chunks of whole units, such as the sequences of a preference pair, for losses that need all tokens of a unit."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from liger_ops.arguments import check_same_device, check_shape, check_tensor, wrong_value
from liger_ops.loss.chunked_loss import KeptTokens
from liger_ops.loss.groups import is_grouped


def join_units(units: Any, target: Any) -> Tensor:
    """The unit of each token, ``[num_tokens]``, of labels that may come in groups.

    Raises:
        TypeError, ValueError: For units that are not int64 tensors like the labels.
    """
    groups = is_grouped(target)
    if groups and (not isinstance(units, list | tuple) or len(units) != len(target)):
        raise wrong_value("units", f"a sequence of {len(target)} tensors, one for each group of target", units)
    pairs = list(zip(units, target, strict=True)) if groups else [(units, target)]
    for number, (each, labels) in enumerate(pairs):
        name = f"units[{number}]" if groups else "units"
        check_tensor(name, each)
        if each.dtype != torch.int64:
            raise wrong_value(name, "an int64 tensor", each)
        check_shape(name, each, labels.shape, "target's")
        check_same_device(name, each, target=labels)
    return torch.cat([each.reshape(-1) for each, _ in pairs])


def plan_units(units: Tensor, kept: Tensor, chunk_size: int) -> KeptTokens:
    """The tokens by their units, in chunks of as many units as fit, at least one. The host waits for the device.

    Args:
        units: ``[num_tokens]``, int64.
        kept: ``[num_tokens]``, bool: tokens that are not ignored.
        chunk_size: Tokens of a chunk of more than one unit, at most.
    """
    order = torch.argsort(units.where(kept, torch.iinfo(units.dtype).max), stable=True)
    _, counts = torch.unique_consecutive(units[order[: int(kept.sum())]], return_counts=True)
    ends = counts.cumsum(0).tolist()
    bounds = [0]
    for end, following in pairwise(ends):
        if following - bounds[-1] > chunk_size:
            bounds.append(end)
    # Without tokens the loop still runs once, to write gradients of zero.
    bounds.append(ends[-1] if ends else min(1, len(units)))
    return KeptTokens(order, len(units), list(pairwise(bounds)))
