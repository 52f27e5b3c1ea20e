"""Model FLOPs of a training step, counted from the architecture.

A structure-only copy of the model (parameters on the meta device, without kernels, engines and hooks) runs forward and
backward, and PyTorch's formulas count the FLOPs of matrix products, convolutions and attention. Frozen weights
therefore need no weight gradients, a layer in front of which nothing is trained needs no backward, adapters cost
little, and of experts those count that a token is sent to. Nothing is recomputed in the copy: the FLOPs are those of
the model, not of the hardware.

Convention, that of PaLM (arXiv:2204.02311, appendix B): a multiplication and an addition are two FLOPs; every token
attends to its whole row, of which a causal mask would need half; element-wise work is not counted. A sliding window
counts with its width, and in packed rows a token attends to its own document.
"""

import copy
import inspect
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import flop_registry

from liger_ops.arguments import check_integer, wrong_type
from lightning_liger.activations.layers import release_layers
from lightning_liger.patching.rules.base import HOOKS, Patched
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
        model: Any module that takes token ids, on any device or on meta, before or after kernels, adapters and engines
            were applied; a LightningModule counts as its ``model``. It is left as it is.
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
    inner: Any = model
    while isinstance(getattr(inner, "module", None), nn.Module) and not hasattr(inner, "training_step"):
        inner = inner.module  # of an engine
    if hasattr(inner, "training_step") and isinstance(getattr(inner, "model", None), nn.Module):
        inner = inner.model
    with torch.inference_mode(False), torch.enable_grad():
        try:
            structure = _structure(inner, _unsharded_shapes(model))
        except Exception:  # of modules that cannot be copied, such as those of TorchScript, or that have no shapes yet
            return _count_weights(inner)
        if any(isinstance(module, nn.RNNBase) for module in structure.modules()):  # meta would run token by token
            return _count_weights(structure)
        for seq_len in _SEQ_LENS:
            with suppress(Exception):  # whatever a model's code does with tensors without values, or with longer rows
                return _trace(structure, seq_len)
    return _count_weights(structure)


# By running a copy


class _Counts:
    """FLOPs of operators: those that grow with the square of the row's length, and others."""

    def __init__(self, seq_len: int) -> None:
        self._square = seq_len**2
        self.linear = 0
        self.pairs: Counter[int | None] = Counter()
        """FLOPs of attention in units of the squared length, by the width of the window."""
        self.window: int | None = None

    def add(self, flops: int) -> None:
        if flops % self._square:
            self.linear += flops
        else:
            self.pairs[self.window] += flops // self._square

    def counting(self) -> AbstractContextManager[Any]:
        """A context whose operators are counted.

        PyTorch's own FlopCounterMode also tells modules apart, for which it needs several times as long.
        """
        from torch.utils._python_dispatch import TorchDispatchMode  # private to torch: not imported with the package

        class Counting(TorchDispatchMode):
            def __torch_dispatch__(_, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                kwargs = kwargs or {}
                if func is torch.ops.aten._local_scalar_dense.default:  # of a tensor without value: conditions hold
                    return torch.ones((), dtype=args[0].dtype, device="cpu").item()
                out = func(*args, **kwargs)
                formula = flop_registry.get(func._overloadpacket)
                if formula is not None:
                    self.add(formula(*args, **kwargs, out_val=out))
                return out

        return Counting()


def _trace(model: nn.Module, seq_len: int) -> ModelFlops:
    inputs = {"input_ids": torch.zeros(1, seq_len, dtype=torch.int64, device="meta")}
    forward, backward = _Counts(seq_len), _Counts(seq_len)

    def enter(module: nn.Module, args: Any) -> None:
        forward.window = cast(int, module.sliding_window)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        forward.window = None

    for module in model.modules():
        if isinstance(getattr(module, "sliding_window", None), int) and next(module.children(), None) is not None:
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)
    with torch.device("meta"):
        LanguageModel(model).leave_out_cache(inputs)
        is_named = "input_ids" in inspect.signature(model.forward).parameters
        with forward.counting():
            output = model(**inputs) if is_named else model(inputs["input_ids"])
        result = next(_floating(getattr(output, "logits", output)))
        if result.requires_grad:
            with backward.counting():
                result.sum().backward()
    # Backward does not know the window of a layer; its FLOPs are a multiple of those of forward.
    factor = 1 + backward.pairs[None] / max(1, forward.pairs.total())
    pairs = tuple((number * factor, window) for window, number in forward.pairs.items())
    return ModelFlops((forward.linear + backward.linear) / seq_len, pairs)


def _floating(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in a model's output."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _floating(part)


# By weights


def _count_weights(model: nn.Module) -> ModelFlops:
    """Two FLOPs for each weight of a matrix product in forward, two for its input's gradient, two for its own."""
    weights = list(_matrix_weights(model))
    is_trained = any(trained for _, trained in weights) or any(
        parameter.requires_grad for parameter in model.parameters()
    )
    forward = sum(2 * number for number, _ in weights)
    backward = sum(2 * number * (1 + trained) for number, trained in weights) if is_trained else 0
    return ModelFlops(float(forward + backward), is_traced=False)


def _matrix_weights(model: nn.Module) -> Iterator[tuple[float, bool]]:
    """How many numbers of each weight a token is multiplied with, and whether the weight is trained."""
    config = getattr(model, "config", None)
    configs = [config, *(value for key, value in vars(config).items() if key.endswith("_config"))] if config else []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        share = _share_of_experts([module, *configs]) if "experts" in name.split(".") else 1.0
        for parameter in module.parameters(recurse=False):
            if is_lazy(parameter):
                continue
            number: float = parameter.numel()
            if isinstance(module, nn.Linear):  # whose weight may be packed
                number = module.in_features * module.out_features if parameter.ndim > 1 else 0
            if parameter.ndim < 2:
                continue
            yield number * share, parameter.requires_grad


def _share_of_experts(owners: Iterable[Any]) -> float:
    """The share of the experts that a token is sent to, from attributes of modules and configurations; 1 if unknown."""
    owners = list(owners)
    top_k, total = (
        next((getattr(owner, name) for owner in owners for name in names if getattr(owner, name, None)), 0)
        for names in (_TOP_K, _NUM_EXPERTS)
    )
    return min(1.0, top_k / total) if top_k and total else 1.0


# The copy


def _structure(model: nn.Module, shapes: Mapping[tuple[int, str], tuple[int, ...]]) -> nn.Module:
    """A copy of a model's structure on the meta device, with its own classes and without hooks; tied weights are tied.

    Attributes other than parameters, buffers and submodules are those of the model. ``shapes`` are those of parameters
    that FSDP has flattened.
    """
    tensors: dict[int, Any] = {}
    modules: dict[int, nn.Module] = {}

    def on_meta(tensor: Tensor | None, shape: tuple[int, ...] | None = None) -> Any:
        if tensor is None:
            return None
        if id(tensor) not in tensors:
            sizes = shape or tuple(getattr(tensor, "ds_shape", tensor.shape))  # DeepSpeed keeps the whole shape there
            empty = torch.empty(sizes, dtype=tensor.dtype, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            tensors[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return tensors[id(tensor)]

    def copied(module: nn.Module) -> nn.Module:
        while True:
            if isinstance(module, FullyShardedDataParallel):
                module = module.module
            elif isinstance(module._modules.get("_orig_mod"), nn.Module):  # of torch.compile
                module = module._modules["_orig_mod"]  # type: ignore[assignment]  # no None
            else:
                break
        if id(module) in modules:
            return modules[id(module)]
        found = modules[id(module)] = nn.Module.__new__(_own_class(type(module)))
        state = {name: value for name, value in vars(module).items() if name not in ("forward", "_compiled_call_impl")}
        state.update({name: type(state[name])() for name in HOOKS if name in state})
        state["_parameters"] = {
            name: on_meta(tensor, shapes.get((id(module), name))) for name, tensor in module._parameters.items()
        }
        for (owner, name), shape in shapes.items():  # FSDP may have taken the parameter from its module
            if owner == id(module) and state["_parameters"].get(name) is None:
                state["_parameters"][name] = nn.Parameter(torch.empty(shape, device="meta"))
                state.pop(name, None)
        state["_buffers"] = {name: on_meta(tensor) for name, tensor in module._buffers.items()}
        found.__dict__.update(state)
        found.__dict__["_modules"] = {
            name: None if child is None else copied(child) for name, child in module._modules.items()
        }
        return found

    structure = copied(model)
    release_layers(structure)
    for module in structure.modules():
        module.__class__ = _own_class(type(module))
    return _with_plain_implementations(structure).train()


def _own_class(module_class: type[nn.Module]) -> type[nn.Module]:
    while module_class.__mro__[1] in (Patched, FSDPModule):
        module_class = module_class.__mro__[2]
    return module_class


def _unsharded_shapes(model: nn.Module) -> dict[tuple[int, str], tuple[int, ...]]:
    """The shapes of parameters that FSDP has flattened, by the module that they are of and their name."""
    shapes = {}
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        handle: Any = unit._handle
        if handle is not None:
            flat = handle.flat_param
            for (name, module, _), shape in zip(flat._param_infos, flat._shapes, strict=True):
                shapes[id(module), name] = tuple(shape)
    return shapes


def _with_plain_implementations(model: nn.Module) -> nn.Module:
    """``model`` with attention and experts that run on meta: each token runs through its own experts by batched
    products, whatever the router says."""
    for module in model.modules():
        config: Any = vars(module).get("config")
        if hasattr(config, "_attn_implementation"):
            config = copy.copy(config)
            config._attn_implementation, config._experts_implementation = "eager", "batched_mm"
            module.__dict__["config"] = config
    return model
