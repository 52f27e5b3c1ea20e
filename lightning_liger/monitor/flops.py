"""Model FLOPs of a training step, counted from the architecture.

A copy of the model without memory (on the meta device, without kernels and hooks) runs forward and backward with rows
of two lengths, and PyTorch's formulas count the FLOPs of matrix products, convolutions and attention. Frozen weights
therefore need no weight gradients, a layer in front of which nothing is trained needs no backward, adapters cost
little, and of experts those count that a token is sent to. Nothing is recomputed in the copy: the FLOPs are those of
the model, not of the hardware.

Convention, that of PaLM (arXiv:2204.02311, appendix B): a multiplication and an addition are two FLOPs; every token
attends to its whole row, of which a causal mask would need half; element-wise work is not counted. A sliding window
counts with its width, and in packed rows a token attends to its own document.
"""

import copy
import functools
import inspect
import operator
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from liger_ops.arguments import check_integer, wrong_type
from lightning_liger.activations.frames import tensors_in
from lightning_liger.activations.layers import release_layers
from lightning_liger.monitor.experts import find_experts, num_arguments, shares_of_parameters, stacked_weights
from lightning_liger.patching.rules.base import Patched
from lightning_liger.training.language_model import LanguageModel

_SEQ_LENS = ((128, 256), (16, 32))
"""Tokens of two rows, the first pair that the model takes; multiples of 64, to which linear attention pads."""
_ASKS_FOR_VALUE = (Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item)


@dataclass(frozen=True)
class ModelFlops:
    """The FLOPs of forward and backward of a model, as a function of the lengths of its sequences."""

    per_token: float
    """In all but attention."""
    attention: tuple[tuple[float, int | None], ...] = ()
    """FLOPs for each pair of a token and one that it attends to, with the width of the window, None without."""
    is_traced: bool = True
    """False if the model does not run on the meta device: weights are counted then, attention is not."""

    def of(self, num_tokens: float, lengths: Sequence[tuple[int, float]]) -> float:
        """The FLOPs of tokens, those of padding included, in sequences: pairs of a length and how many have it."""
        pairs = (sum(count * num_pairs(length, window) for length, count in lengths) for _, window in self.attention)
        return self.for_pairs(num_tokens, pairs)

    def for_pairs(self, num_tokens: float, pairs: Iterable[float]) -> float:
        """The FLOPs of tokens of which the pairs of attention are known, for each entry of ``attention``."""
        costs = (cost for cost, _ in self.attention)
        return self.per_token * num_tokens + sum(map(operator.mul, costs, pairs))


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
    model = counted_part(model)
    eager = torch.compiler.set_stance("force_eager")
    with torch.inference_mode(False), torch.enable_grad(), eager, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of compiled modules, about the counter's hooks
        try:
            structure = _structure(model)
        except Exception:  # of modules that cannot be copied, such as those of TorchScript, or that have no shapes yet
            return _count_weights(model)
        if not any(isinstance(module, nn.RNNBase) for module in structure.modules()):  # which run token by token
            for seq_lens in _SEQ_LENS:
                with suppress(Exception):  # whatever code does with tensors without values, or with longer rows
                    return _trace(structure, *seq_lens)
    return _count_weights(structure)


def counted_part(module: nn.Module) -> nn.Module:
    """The ``model`` of a LightningModule, any other module itself."""
    inner = getattr(module, "model", None)
    return inner if hasattr(module, "training_step") and isinstance(inner, nn.Module) else module


def float8_flops(converted: Iterable[Any]) -> float:
    """The FLOPs of a token in float8, forward and backward, of linear layers that ``converted_layers`` found."""
    return sum(
        2.0
        * member.out_features
        * member.in_features
        * (2 + (member.weight.requires_grad and not layers.recipe.high_precision_wgrad))
        for layers in converted
        for member in layers.members
    )


# By running a copy


class ValuesOfMeta(TorchFunctionMode):
    """Answers code that asks for values of tensors on the meta device: conditions hold."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKS_FOR_VALUE and args[0].is_meta:
            return self.value_of(args[0])
        return func(*args, **(kwargs or {}))

    def value_of(self, tensor: Tensor) -> Any:
        """What stands for the value of a tensor."""
        return torch.ones((), dtype=tensor.dtype, device="cpu").item()


def _trace(model: nn.Module, short: int, long: int) -> ModelFlops:
    """The FLOPs of rows of two lengths tell those of a token and of a pair."""

    def per_pair(flops_short: float, flops_long: float) -> float:
        return (flops_long / long - flops_short / short) / (long - short)

    (short_forward, flops_short), (long_forward, flops_long) = (_run(model, seq_len) for seq_len in (short, long))
    windows: dict[str, int] = {}
    for name, module in model.named_modules(prefix=type(model).__name__):
        window = getattr(module, "sliding_window", None)
        if isinstance(window, int) and next(module.children(), None) and not name.startswith(tuple(windows)):
            windows[name] = window
    forward: Counter[int | None] = Counter({None: per_pair(short_forward["Global"], long_forward["Global"])})
    pairs, forward_flops = per_pair(flops_short, flops_long), forward.total()
    for name in windows.keys() & long_forward.keys():
        number = per_pair(short_forward[name], long_forward[name])
        forward.update({windows[name]: number, None: -number})
    # Backward does not know the window of a layer; its FLOPs are a multiple of those of forward.
    attention = tuple((number * (pairs / forward_flops), width) for width, number in forward.items() if number > 0)
    return ModelFlops(flops_long / long - pairs * long, attention)


def _run(model: nn.Module, seq_len: int) -> tuple[dict[str, int], int]:
    """The FLOPs of the forward of a row, of each module by its name, and those of forward and backward in all."""
    inputs = {"input_ids": torch.zeros(1, seq_len, dtype=torch.int64, device="meta")}
    with torch.device("meta"), ValuesOfMeta(), FlopCounterMode(display=False) as counter:
        LanguageModel(model).leave_out_cache(inputs)
        is_named = "input_ids" in inspect.signature(model.forward).parameters
        output = model(**inputs) if is_named else model(inputs["input_ids"])
        result = next(each for each in tensors_in(getattr(output, "logits", output)) if each.is_floating_point())
        forward = {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}
        if result.requires_grad:
            result.sum().backward()
    return forward, counter.get_total_flops()


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
        for name, value in vars(module).items():
            if name.endswith("hooks") and isinstance(value, dict):
                value.clear()
        if not hasattr(module, "_orig_mod"):  # of torch.compile, whose wrapper has its forward there
            vars(module).pop("forward", None)
        while isinstance(module, Patched):
            module.__class__ = module.liger_original  # type: ignore[assignment]
    for module in structure.modules():
        if isinstance(module, PreTrainedModel):
            module.set_attn_implementation("eager")
    _simplify_experts(structure)
    return structure.train()


def _simplify_experts(model: nn.Module) -> None:
    """Lets experts run on the meta device, on as many tokens as get them wherever a router would send these."""
    experts: dict[nn.Module, tuple[int, float]] = {
        module: (number, 1.0) for module, number in find_experts(model).items()
    }
    for module, parameter, share in shares_of_parameters(model):
        # Llama 4's get all tokens, most of which are 0.
        if share < 1 and parameter.dim() == 3 and len(list(module.parameters())) == 2 and num_arguments(module) == 1:
            experts[module] = len(parameter), share
    for module, (number, share) in experts.items():
        vars(module)["forward"] = functools.partial(
            _run_pairs, module, number, share, inspect.signature(module.forward)
        )


def _run_pairs(
    module: nn.Module, num_experts: int, share: float, signature: inspect.Signature, *args: Any, **kwargs: Any
) -> Tensor:
    """In place of a forward of experts: products of one number, as wide as those of each pair of a token and an expert.

    The outputs of the products, which nothing reads, depend on each other, on the token and on its factors as experts'.
    """
    x, *others = signature.bind(*args, **kwargs).args
    weights = stacked_weights(module) or [each for each in module.parameters() if each.dim() == 2]
    num_choices = max((len(each) for each in stacked_weights(module)), default=num_experts)
    num_pairs = round(others[0].numel() * num_experts / num_choices if others else len(x) * share)
    rows = x.flatten()[:1].expand(num_pairs, 1)
    for weight in weights:
        number = len(weight) if weight.dim() == 3 else num_experts
        rows = (rows.to(weight.dtype) @ weight.flatten()[None, : weight.numel() // number]).sum(-1, keepdim=True)
    total = rows.sum() * others[1].sum() if others else rows.sum()
    return x + total.to(x.dtype)


# By weights


def _count_weights(model: nn.Module) -> ModelFlops:
    """Two FLOPs for each weight of a matrix product in forward, two for its input's gradient, two for its own."""
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    flops = 0.0
    for module, parameter, share in shares_of_parameters(model):
        if isinstance(module, nn.Embedding) or is_lazy(parameter) or parameter.ndim < 2:
            continue
        number = parameter.numel()
        if isinstance(module, nn.Linear):  # whose weight may be packed
            number = module.in_features * module.out_features
        flops += 2 * number * share * (1 + is_trained + parameter.requires_grad)
    return ModelFlops(flops, is_traced=False)
