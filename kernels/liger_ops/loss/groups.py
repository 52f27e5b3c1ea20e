"""Several groups of tokens over one head, as heads of Medusa with a shared projection are: concatenated to one.

One loop over all of them computes one gradient of the head, where a call for each would compute as many and add them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from liger_ops.arguments import check_number, check_shape, check_tensor, wrong_type, wrong_value


class Groups(NamedTuple):
    """How tokens were concatenated."""

    shapes: list[torch.Size]  # of each group's labels

    def split(self, flat: Tensor) -> list[Tensor]:
        """Each group's part of a value of all tokens, ``[num_tokens]``, in its labels' shape."""
        parts = flat.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def split_fields(self, values: Any) -> tuple[Any, ...]:
        """A NamedTuple of such values, or None, as one of each group."""
        fields = [[None] * len(self.shapes) if value is None else self.split(value) for value in values]
        return tuple(type(values)(*values_of_one) for values_of_one in zip(*fields, strict=True))


def is_grouped(input: Any) -> TypeGuard[Sequence[Tensor]]:
    """Whether hidden states come in groups."""
    return isinstance(input, list | tuple) and bool(input) and all(isinstance(each, Tensor) for each in input)


def join_groups(input: Sequence[Tensor], target: Any, adapter: Any) -> tuple[Groups, Tensor, Tensor, Any]:
    """The groups, their concatenated hidden states and labels, and the adapter with its input concatenated.

    Raises a TypeError or ValueError for what does not fit together, and for sequences of different lengths.
    """
    _check_sequence("target", target, len(input))
    hidden_size = input[0].shape[-1:]
    for number, (states, labels) in enumerate(zip(input, target, strict=True)):
        kind = states.dtype, states.device, labels.dtype, labels.device
        expected = input[0].dtype, input[0].device, target[0].dtype, input[0].device
        if states.dim() == 0 or states.shape != (*labels.shape, *hidden_size) or kind != expected:
            raise ValueError(
                f"input[{number}] must hold hidden states of target[{number}]'s {tuple(labels.shape)} tokens, of"
                f" input[0]'s hidden_size {tuple(hidden_size)}, dtypes and device {expected[:3]}, got shape"
                f" {tuple(states.shape)}, {kind}"
            )
    groups = Groups([labels.shape for labels in target])
    if adapter is not None:
        if not isinstance(adapter, list | tuple) or len(adapter) != 2:
            raise wrong_type("adapter", "a pair of a sequence of tensors and a tensor, or None", adapter)
        inputs, weight = adapter
        _check_sequence("adapter[0]", inputs, len(input))
        for number, (each, shape) in enumerate(zip(inputs, groups.shapes, strict=True)):
            check_shape(f"adapter[0][{number}]", each, (*shape, *inputs[0].shape[-1:]))
        adapter = torch.cat([each.reshape(-1, each.shape[-1]) for each in inputs]), weight
    states = torch.cat([each.reshape(-1, each.shape[-1]) for each in input])
    return groups, states, torch.cat([labels.reshape(-1) for labels in target]), adapter


def join_values(name: str, values: Any, groups: Groups, like: Tensor) -> Any:
    """One value for each token, ``[num_tokens]``, of a sequence with a number or a tensor for each group.

    None stays None. ``like`` has the device.
    """
    if values is None:
        return None
    if not isinstance(values, list | tuple):
        raise wrong_type(name, "a sequence of numbers or tensors, one for each group, or None", values)
    if len(values) != len(groups.shapes):
        raise wrong_value(name, f"a sequence of one number or tensor for each of {len(groups.shapes)} groups", values)
    joined = []
    for number, (value, shape) in enumerate(zip(values, groups.shapes, strict=True)):
        if not isinstance(value, Tensor):
            check_number(f"{name}[{number}]", value)
            value = torch.full((), value, dtype=torch.float32, device=like.device).expand(shape)
        check_shape(f"{name}[{number}]", value, shape, "its target's")
        joined.append(value.reshape(-1))
    return torch.cat(joined)


def _check_sequence(name: str, value: Any, length: int) -> None:
    if not isinstance(value, list | tuple):
        raise wrong_type(name, "a sequence of tensors, one for each group of input", value)
    if len(value) != length:
        raise wrong_value(name, f"a sequence of {length} tensors, one for each group of input", value)
    for number, each in enumerate(value):
        check_tensor(f"{name}[{number}]", each)
