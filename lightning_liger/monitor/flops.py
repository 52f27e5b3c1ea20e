"""Model FLOPs of a training step, counted from the architecture.

A copy of the model without memory (on the meta device, without kernels and hooks) runs forward and backward, and
PyTorch's formulas count the FLOPs of matrix products, convolutions and attention. Frozen weights therefore need no
weight gradients, a layer in front of which nothing is trained needs no backward, adapters cost little, and of experts
those count that a token is sent to. Nothing is recomputed in the copy: the FLOPs are those of the model, not of the
hardware.

Convention, that of PaLM (arXiv:2204.02311, appendix B): a multiplication and an addition are two FLOPs; every token
attends to its whole row, of which a causal mask would need half; element-wise work is not counted. A sliding window
counts with its width, and in packed rows a token attends to its own document.
"""

import copy
import inspect
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel

from liger_ops.arguments import check_integer, wrong_type
from lightning_liger.activations.layers import release_layers
from lightning_liger.patching.rules.base import Patched
from lightning_liger.training.language_model import LanguageModel

_SEQ_LENS = (251, 61, 31)
"""Tokens of the row, the first that the model takes: primes, so that FLOPs which its square divides are those of
attention, and 251 is almost the 256 tokens that linear attention pads to."""
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k", "top_k")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class ModelFlops:
    """The FLOPs of forward and backward of a model, as a function of the lengths of its sequences."""

    per_token: float
    """FLOPs of a token in all but attention."""
    attention: tuple[tuple[float, int | None], ...] = ()
    """FLOPs for each pair of a token and one that it attends to, with the width of the window, None without."""
    is_traced: bool = True
    """False if the model does not run on the meta device: weights are counted then, attention is not."""

    def of(self, num_tokens: float, lengths: Iterable[tuple[int, float]]) -> float:
        """The FLOPs of some rows.

        Args:
            num_tokens: The number of all tokens, those of padding included.
            lengths: Pairs of a length of sequences and how many have it.
        """
        lengths = list(lengths)
        pairs = [sum(count * num_pairs(length, window) for length, count in lengths) for _, window in self.attention]
        return self.of_pairs(num_tokens, pairs)

    def of_pairs(self, num_tokens: float, pairs: Iterable[float]) -> float:
        """The FLOPs of tokens of which the pairs of attention are known, for each entry of ``attention``."""
        per_pair = (cost for cost, _ in self.attention)
        return self.per_token * num_tokens + sum(map(operator.mul, per_pair, pairs))


def num_pairs(length: int, window: int | None) -> int:
    """The pairs of a token and one that it attends to, in a row of ``length`` tokens."""
    return length * min(length, window or length)


def count_flops(model: nn.Module, seq_len: int, batch_size: int = 1) -> int:
    """Model FLOPs of forward and backward of a batch, counted from the architecture.

    Args:
        model: Any module that takes token ids, on any device or on meta, before or after kernels and adapters were
            applied, and before an engine shards it; a LightningModule counts as its ``model``. It is left as it is.
        seq_len: Tokens of a row.
        batch_size: Rows.

    Returns:
        The FLOPs, without recomputation; see the module's docstring for what is counted.

    Raises:
        TypeError: If ``model`` is no module, or a number no integer.
        ValueError: If a number is below 1.
    """
    check_integer("seq_len", seq_len, at_least=1)
    check_integer("batch_size", batch_size, at_least=1)
    return round(model_flops(model).of(seq_len * batch_size, [(seq_len, batch_size)]))


def model_flops(model: nn.Module) -> ModelFlops:
    """The FLOPs of a model as a function of the lengths of its sequences; see :func:`count_flops`."""
    if not isinstance(model, nn.Module):
        raise wrong_type("model", "a torch.nn.Module", model)
    inner = getattr(model, "model", None)
    model = inner if hasattr(model, "training_step") and isinstance(inner, nn.Module) else model
    with torch.inference_mode(False), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        try:
            structure = _structure(model)
        except Exception:  # of modules that cannot be copied, such as those of TorchScript, or that have no shapes yet
            return _count_weights(model)
        if not any(isinstance(module, nn.RNNBase) for module in structure.modules()):  # which run token by token
            for seq_len in _SEQ_LENS:
                with suppress(Exception):  # whatever code does with tensors without values, or with longer rows
                    return _trace(structure, seq_len)
    return _count_weights(structure)


# By running a copy


class FlopCounter(torch.utils._python_dispatch.TorchDispatchMode):
    """Passes the FLOPs of each operator in its context to ``add``, by the formulas of PyTorch.

    PyTorch's own FlopCounterMode also tells modules apart, for which it needs several times as long.
    """

    formulas: Mapping[Any, Callable[..., int]] = flop_registry

    def __init__(self, add: Callable[[int], None]) -> None:
        super().__init__()
        self.add_flops = add

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:  # of a tensor without value
            return self.value_of(args[0])
        out = func(*args, **(kwargs or {}))
        formula = self.formulas.get(func._overloadpacket)
        if formula is not None:
            self.add_flops(formula(*args, **(kwargs or {}), out_val=out))
        return out

    def value_of(self, tensor: Tensor) -> Any:
        """What stands for the value of a tensor: conditions hold."""
        return torch.ones((), dtype=tensor.dtype, device="cpu").item()


def _trace(model: nn.Module, seq_len: int) -> ModelFlops:
    inputs = {"input_ids": torch.zeros(1, seq_len, dtype=torch.int64, device="meta")}
    linear = 0
    forward: Counter[int | None] = Counter()
    """FLOPs of attention by the width of the window, in units of the squared length."""
    backward: Counter[int | None] = Counter()
    pairs, window = forward, None

    def add(flops: int) -> None:
        nonlocal linear
        if flops % seq_len**2:
            linear += flops
        else:
            pairs[window] += flops // seq_len**2

    def enter(module: Any, args: Any) -> None:
        nonlocal window
        window = module.sliding_window

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal window
        window = None

    for module in model.modules():
        if isinstance(getattr(module, "sliding_window", None), int) and next(module.children(), None) is not None:
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)
    with torch.device("meta"), FlopCounter(add):
        LanguageModel(model).leave_out_cache(inputs)
        is_named = "input_ids" in inspect.signature(model.forward).parameters
        output = model(**inputs) if is_named else model(inputs["input_ids"])
        result = next(_floating(getattr(output, "logits", output)))
        pairs = backward
        if result.requires_grad:
            result.sum().backward()
    # Backward does not know the window of a layer; its FLOPs are a multiple of those of forward.
    factor = 1 + backward.total() / max(1, forward.total())
    return ModelFlops(linear / seq_len, tuple((number * factor, width) for width, number in forward.items()))


def _floating(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in a model's output."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _floating(part)


def _structure(model: nn.Module) -> nn.Module:
    """A copy of a model on the meta device, in training mode, with its own classes and without hooks."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        shape = getattr(tensor, "ds_shape", tensor.shape)  # DeepSpeed keeps the whole shape there
        empty = torch.empty(shape, dtype=tensor.dtype, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    structure = copy.deepcopy(model, memo)
    release_layers(structure)
    for module in structure.modules():
        for hooks in [value for name, value in vars(module).items() if name.endswith("_hooks")]:
            hooks.clear()
        if not hasattr(module, "_orig_mod"):  # of torch.compile, whose wrapper has its forward there
            vars(module).pop("forward", None)
        while isinstance(module, Patched):
            module.__class__ = module.liger_original  # type: ignore[assignment]
    for module in structure.modules():
        if isinstance(module, PreTrainedModel):  # that run on meta: tokens meet their experts whatever the router says
            module.set_attn_implementation("eager")
            module.set_experts_implementation("batched_mm")
    return structure.train()


# By weights


def _count_weights(model: nn.Module) -> ModelFlops:
    """Two FLOPs for each weight of a matrix product in forward, two for its input's gradient, two for its own."""
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    flops = sum(2 * number * (1 + is_trained + trained) for number, trained in _matrix_weights(model))
    return ModelFlops(float(flops), is_traced=False)


def _matrix_weights(model: nn.Module) -> Iterator[tuple[float, bool]]:
    """How many numbers of each weight a token is multiplied with, and whether the weight is trained."""
    config = getattr(model, "config", None)
    configs = (
        [config, *(value for key, value in vars(config).items() if key.rpartition("_")[2] == "config")]
        if config
        else []
    )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        share = _share_of_experts([module, *configs]) if "experts" in name.split(".") else 1.0
        for parameter in module.parameters(recurse=False):
            if not is_lazy(parameter) and parameter.ndim > 1:
                # The weight of a linear module may be packed.
                is_linear = isinstance(module, nn.Linear)
                number = module.in_features * module.out_features if is_linear else parameter.numel()
                yield number * share, parameter.requires_grad


def _share_of_experts(owners: list[Any]) -> float:
    """The share of the experts that a token is sent to, from attributes of modules and configurations; 1 if unknown."""
    top_k, total = (
        next((getattr(owner, name) for owner in owners for name in names if getattr(owner, name, None)), 0)
        for names in (_TOP_K, _NUM_EXPERTS)
    )
    return min(1.0, top_k / total) if top_k and total else 1.0
