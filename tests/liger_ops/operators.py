"""A log of the operators that run."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class OperatorLog(TorchDispatchMode):
    """Records the operators, their largest output and the sizes of matrix products; and our own with their arguments.

    It only watches: tests make ``backend.is_traced`` say so where the products inside of an op are to be seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.products: list[tuple[int, int, int]] = []
        """Rows, inner size and columns of each."""
        self.operators: set[Any] = set()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "liger_ops":
            self.calls.append((func, tree_map_only(Tensor, Tensor.detach, args)))
        result = func(*args, **(kwargs or {}))
        self.operators.add(func.overloadpacket)
        outputs = result if isinstance(result, (tuple, list)) else [result]
        self.largest = max([self.largest, *(out.numel() for out in outputs if isinstance(out, Tensor))])
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            left, right = args[-2:]
            self.products.append((*left.shape, right.shape[1]))
        return result
