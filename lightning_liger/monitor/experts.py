"""Experts of a mixture: which share of their parameters a token uses, and how evenly tokens are spread over them.

Modules of experts are known by their call, which is that of :class:`liger_ops.nn.SparseMoE` and of transformers: with
tokens, the experts of each, and their factors. So they are whether kernels replaced them or not.
"""

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k", "top_k")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def stacked_weights(module: nn.Module) -> list[nn.Parameter]:
    """The module's own parameters ``[num_experts, ., .]``."""
    return [each for each in module.parameters(recurse=False) if not is_lazy(each) and each.dim() == 3]


def num_arguments(module: nn.Module) -> int:
    """How many named arguments ``forward`` takes, 0 if it takes any number."""
    parameters = inspect.signature(module.forward).parameters.values()
    return 0 if any(each.kind is not each.POSITIONAL_OR_KEYWORD for each in parameters) else len(parameters)


def find_experts(model: nn.Module) -> dict[nn.Module, int]:
    """Modules called with tokens, the experts of each and their factors, and how many experts each has."""
    found = {}
    for module in model.modules():
        sizes = [len(each) for each in stacked_weights(module)]
        number = min(sizes) if len(sizes) > 1 else getattr(module, "num_experts", None)
        if isinstance(number, int) and num_arguments(module) == 3:
            found[module] = number
    return found


# Parameters


def num_active_parameters(model: nn.Module) -> int:
    """How many parameters a token uses: all, but of experts only those that it is sent to."""
    numbers = {each: each.numel() * share for _, each, share in shares_of_parameters(model)}
    return round(sum(numbers.values()))


def shares_of_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter, float]]:
    """Each module, each of its own parameters, and the share of the parameter that a token uses."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        owned, stacked = list(module.parameters(recurse=False)), [len(each) for each in stacked_weights(module)]
        is_expert = "experts" in name.split(".") or getattr(module, "num_experts", 0) in stacked
        share = _share_of_choices(name, modules, max(stacked, default=0)) if owned and is_expert else 1.0
        for each in owned:
            # Choices without an expert of their own return the token as it is.
            yield module, each, share * (min(stacked) / len(each) if share < 1 and each.dim() == 3 else 1.0)


def _share_of_choices(name: str, modules: Mapping[str, nn.Module], num_choices: int) -> float:
    """The share of a router's choices that a token is sent to, 1 if unknown.

    Numbers are attributes of the module, of those around it, or of the configuration.
    """
    parts = name.split(".") if name else []
    owners = [vars(modules[".".join(parts[:depth])]) for depth in range(len(parts), -1, -1)]
    config = next((owner["config"] for owner in owners if hasattr(owner.get("config"), "__dict__")), None)
    settings = vars(config) if config is not None else {}
    owners += [settings, *(vars(each) for key, each in settings.items() if key.endswith("config") and each)]
    top_k, total = (
        next((owner[each] for owner in owners for each in names if isinstance(owner.get(each), int)), 0)
        for names in (_TOP_K, _NUM_EXPERTS)
    )
    total = num_choices or total
    return min(1.0, top_k / total) if top_k and total else 1.0


# Tokens


class ExpertLoads:
    """Counts the tokens of each expert while :attr:`is_counting`, on a device and without waiting for it.

    What runs again in backward is counted once. Code that is compiled is not counted.

    Args:
        experts: As :func:`find_experts` returns them.
        device: Where the counts are.
    """

    def __init__(self, experts: Mapping[nn.Module, int], device: torch.device) -> None:
        self.is_counting = self._has_counts = False
        sizes = torch.tensor(list(experts.values()), dtype=torch.int64)
        num_columns = int(sizes.max()) if experts else 0
        self._exists = (torch.arange(num_columns) < sizes[:, None]).to(device)
        # The last column is of what is no expert.
        self._counts = torch.zeros(len(experts), num_columns + 1, dtype=torch.int64, device=device)
        self._hooks = [
            module.register_forward_pre_hook(functools.partial(self._count, row, number), with_kwargs=True)
            for row, (module, number) in enumerate(experts.items())
        ]

    def _count(self, row: int, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not self.is_counting or torch._C._current_graph_task_id() != -1:
            return
        index = inspect.signature(module.forward).bind(*args, **kwargs).args[1]
        if isinstance(index, Tensor) and not index.is_floating_point():
            flat = index.detach().flatten().long().to(self._counts.device)
            flat = flat.where((flat >= 0) & (flat < number), self._exists.shape[1])
            self._counts[row].scatter_add_(0, flat, torch.ones_like(flat))
            self._has_counts = True

    def take(self) -> Tensor:
        """The counts since the last call, which ranks may add up."""
        counts = self._counts[:, :-1].flatten()
        self._counts.zero_()
        return counts

    def imbalance(self, counts: Tensor) -> dict[str, Tensor]:
        """What is logged of counts, as scalars on the device; nothing if no module was ever counted."""
        if not self._has_counts:
            return {}
        loads = counts.view_as(self._exists)
        totals, exists = loads.sum(1), self._exists & loads.any(1, keepdim=True)
        most = loads.amax(1) * self._exists.sum(1) / totals.clamp(min=1)
        idle = ((loads == 0) & exists).sum() / exists.sum().clamp(min=1)
        return {"expert_imbalance": most.max(), "idle_experts_share": idle}

    def remove(self) -> None:
        """Counts no more."""
        for each in self._hooks:
            each.remove()
