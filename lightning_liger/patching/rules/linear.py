"""Linear layers in float8: which ones of a model, and which of them share an input and run as one."""

import fnmatch
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.utils import parametrize

from liger_ops.arguments import did_you_mean
from liger_ops.backend import autocast_dtype
from liger_ops.fp8.linear import DTYPES, scaled_linear
from liger_ops.fp8.products import MULTIPLE, Float8Options
from liger_ops.fp8.weights import Float8Shard, Float8Weight, plain, unwritable
from lightning_liger.activations.cheap import count_writes
from lightning_liger.activations.frames import end_recomputation_with
from lightning_liger.activations.layers import find_layers
from lightning_liger.activations.tiles import has_hooks
from lightning_liger.patching.float8 import ATTRIBUTE, MIN_TOKENS, Float8Recipe, converted_layers, is_too_small
from lightning_liger.patching.report import PatchEntry
from lightning_liger.patching.rules.base import Randoms, Replacement
from lightning_liger.patching.verify import Mismatch

KERNEL = "fp8"
_QUERIES, _KEYS = {"q", "query", "wq"}, {"k", "kv", "key", "wk"}
_ATTENTION = {"v", "qkv", "value", "wv", *_QUERIES, *_KEYS}
_TOLERANCE = 0.06


_this_thread = threading.local()
"""Has weak references to the layers of which outputs wait, one at a time."""


class Float8Layers:
    """Linear layers that a recipe converts, one or several that get the same input one after another.

    The first one that is called computes the outputs of all, the others take theirs. A layer that turns out to have an
    input of its own leaves as soon as backward of the calls that computed all is over: what it recomputes has to be the
    same.
    """

    def __init__(self, recipe: Float8Recipe, members: Sequence[nn.Linear]) -> None:
        self.recipe = recipe
        self.min_tokens = MIN_TOKENS if recipe.min_tokens == "auto" else recipe.min_tokens
        self.members = list(members)
        self.num_products = [0, 0]
        """Products of one token and one weight in float8, and in other dtypes by modules in training mode."""
        self.compiled_products = 0, 0
        """The same of the last call in compiled code, until :meth:`take_products`."""
        self.sharing = list(members)
        """Those that run as one."""
        self._leaving: nn.Linear | None = None
        self._first: nn.Linear | None = None
        self._left: frozenset[int] = frozenset()
        """Whose outputs nobody took in the last round."""
        self._nodes = weakref.WeakSet[Any]()
        """Of the graphs of calls that computed the outputs of all, until their backward."""
        self._lock = threading.RLock()
        self._waiting: tuple[Any, Hashable, bool, dict[int, tuple[Tensor, tuple[Hashable, ...]]]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lock": None, "_nodes": None, "_waiting": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock(), _nodes=weakref.WeakSet())

    def has_few_tokens(self, x: Tensor) -> bool:
        """Whether ``x`` is a plain tensor of so few tokens that nothing else has to be looked at."""
        return type(x) is Tensor and x.numel() < self.min_tokens * self.members[0].in_features

    def applies_to(self, x: Tensor, members: Collection[nn.Linear]) -> bool:
        """Whether the recipe multiplies ``x`` by the weights of these members in float8."""
        for member in members:
            _check_frozen(member)
        if type(x) not in (Tensor, nn.Parameter) or x.dim() == 0 or x.shape[-1] != self.members[0].in_features:
            return False
        return all(
            self._is_ready(member, x)
            and not isinstance(member.weight, DTensor)
            and member.weight.shape == (member.out_features, member.in_features)  # not sharded, or freed
            for member in members
        )

    def _is_ready(self, member: nn.Linear, x: Tensor) -> bool:
        """Whether a member's mode, the number of tokens and the dtypes are those that the recipe asks for.

        Dtypes that differ outside of autocast are left to PyTorch, which refuses them in calls of any size.
        """
        autocast = autocast_dtype(x.device.type)
        return (
            (member.training or self.recipe.evaluate)
            and x.shape[:-1].numel() >= self.min_tokens
            and x.dtype in DTYPES
            and member.weight.dtype in DTYPES
            and (x.dtype == member.weight.dtype if autocast is None else autocast == torch.bfloat16)
        )

    def count(self, x: Tensor, members: Collection[nn.Linear], in_float8: bool) -> None:
        """Counts the products of a call; in compiled code, where layers run one by one, those of a whole group."""
        is_compiling = torch.compiler.is_compiling()
        members = self.members if is_compiling and len(members) == 1 else members
        number = x.shape[:-1].numel() * sum([member.out_features * member.in_features for member in members])
        if is_compiling:  # adding would depend on the sum so far, for which code is compiled anew
            self.compiled_products = (number, 0) if in_float8 else (0, number)
        else:
            self.num_products[0 if in_float8 else 1] += number

    def take_products(self) -> list[int]:
        """What was counted so far, of compiled code only the last call before each of these."""
        self.num_products = [sum(each) for each in zip(self.num_products, self.compiled_products, strict=True)]
        self.compiled_products = 0, 0
        return self.num_products

    def __call__(self, member: nn.Linear, x: Tensor, original: type[nn.Linear]) -> Tensor:
        if type(x) is not Tensor and isinstance(x, DTensor):
            parallel = self._run_parallel(member, x)
            if parallel is not None:
                self.count(x, [member], True)
                return parallel
        if parametrize.is_parametrized(member) or self.has_few_tokens(x) or not self.applies_to(x, [member]):
            _check_frozen(member)
            if member.training:
                self.count(x, [member], False)
            return original.forward(member, x)
        self.count(x, [member], True)
        if torch.compiler.is_compiling():
            return _run([member], x, self.recipe.options)[0]
        with self._lock:
            output = self._take(member, x) if any(each is member for each in self.sharing) else None
            members = self._partners(member, x) if output is None and self._has_partners(member) else [member]
        if output is not None:
            return output
        if len(members) > 1:
            self._forget_others()
        outputs = _run(members, x, self.recipe.options)
        if len(members) > 1:
            results = zip(members, outputs, strict=True)
            others = {id(each): (result, _state_of(each)) for each, result in results if each is not member}
            if (node := outputs[0].grad_fn) is not None:
                self._nodes.add(node)
                node.register_prehook(partial(_end, self._nodes, weakref.ref(node), members))
            is_forward = torch._C._current_graph_task_id() == -1
            self._waiting = weakref.ref(x), _state(x), is_forward, others
        return outputs[members.index(member)]

    def _forget_others(self) -> None:
        """Frees outputs, and the graph that they are of, that wait because an error ended a forward between layers."""
        last = getattr(_this_thread, "waiting", lambda: None)()
        if last is not None and last is not self:
            last._waiting = None
        _this_thread.waiting = weakref.ref(self)

    def _run_parallel(self, member: nn.Linear, x: DTensor) -> DTensor | None:
        """The output of a layer of which tensor parallelism gave this rank some outputs or inputs; None if it cannot.

        Scales are of each rank's own part of a row: ranks exchange nothing else than without float8.
        """
        weight, bias, last = member.weight, member.bias, x.dim() - 1
        if not isinstance(weight, DTensor) or weight.device_mesh != x.device_mesh or x.device_mesh.ndim != 1:
            return None
        if not self._is_ready(member, x):
            return None
        layouts = x.placements[0], weight.placements[0]
        if layouts == (Replicate(), Shard(0)):
            local_x, output = x.to_local(grad_placements=[Partial()]), Shard(last)
        elif layouts == (Shard(last), Shard(1)) and bias is None:
            local_x, output = x.to_local(), Partial()
        else:
            return None
        local = weight.to_local()
        is_small = self.recipe.filter == "auto" and is_too_small(*local.shape)
        if is_small or any(size % MULTIPLE for size in local.shape):
            return None
        local_bias = bias.to_local() if isinstance(bias, DTensor) else bias
        (y,) = scaled_linear(local_x, [local], [local_bias], options=self.recipe.options)
        return DTensor.from_local(y, x.device_mesh, [output], run_check=False)

    def _take(self, member: nn.Linear, x: Tensor) -> Tensor | None:
        """The output that a call of another member computed."""
        if self._waiting is None:
            return None
        of, state, is_forward, outputs = self._waiting
        if id(member) not in outputs:  # a new round: others were not called in the last one
            left = frozenset(outputs)
            if is_forward and left == self._left:  # twice, which is no error that ended a forward between them
                self._leave(next(each for each in self.sharing if id(each) in left), left)
            self._left, self._waiting = left if is_forward else self._left, None
            return None
        if of() is not x or state != _state(x):
            if of() is not x:  # as in attention to another sequence
                self._leave(member, outputs)
            self._waiting = None
            return None
        output, state_of_member = outputs.pop(id(member))
        if not outputs:
            self._left, self._waiting = frozenset(), None
        return output if state_of_member == _state_of(member) else None

    def _leave(self, member: nn.Linear, left: Collection[int]) -> None:
        """Has a layer leave; the one that was called first if nobody took what it computed for the others."""
        self._leaving = self._leaving or (self._first if len(left) == len(self.sharing) - 1 else member)

    def _has_partners(self, member: nn.Linear) -> bool:
        """Whether a call computes the outputs of all; what backward recomputes does so where the call itself did."""
        if self._leaving is not None:
            if self._nodes:
                return member is self._first
            self.sharing = [each for each in self.sharing if each is not self._leaving]
            self._leaving = self._first = None
        return len(self.sharing) > 1 and any(each is member for each in self.sharing)

    def _partners(self, member: nn.Linear, x: Tensor) -> list[nn.Linear]:
        if x.is_inference() or any(map(_is_called_otherwise, self.sharing)) or not self.applies_to(x, self.sharing):
            return [member]
        self._first = member
        return self.sharing


def _end(
    nodes: "weakref.WeakSet[Any]",
    node: Callable[[], Any],
    members: Sequence[nn.Linear],
    gradients: Sequence[Tensor | None],
) -> None:
    """The backward of several layers begins: one without a gradient would still have its hooks called.

    Raises:
        RuntimeError: If there are such hooks.
    """
    nodes.discard(node())
    for member, gradient in zip(members, gradients, strict=True):
        hooks: list[Any] = [
            hook
            for each in member._parameters.values()
            if gradient is None and each is not None and each.requires_grad
            for hook in (each._backward_hooks, each._post_accumulate_grad_hooks)
        ]
        if any(hooks):
            raise RuntimeError(
                f"the output of {member} was not used, but that of a layer with the same input, with which it runs as"
                " one in float8: hooks of its parameters, such as those of an optimizer that steps inside backward,"
                " would be called without a gradient. Leave the layer out by filter= of the Float8Recipe"
            )


def _state(x: Tensor) -> tuple[Hashable, ...]:
    """What must be the same for two layers' outputs to come from one call."""
    of_x = count_writes(x), x.requires_grad, x.untyped_storage()._cdata
    return *of_x, torch.is_grad_enabled(), threading.get_ident(), autocast_dtype(x.device.type)


def _state_of(member: nn.Linear) -> tuple[Hashable, ...]:
    """What must be the same of a layer for an output to be its."""
    tensors = [each for each in (member.weight, member.bias) if each is not None]
    # Assigning to .data counts as no write.
    return tuple((id(each), count_writes(each), each.requires_grad, each.untyped_storage()._cdata) for each in tensors)


def _check_frozen(member: nn.Linear) -> None:
    """Raises if a weight that is held in float8 is to be trained: optimizers may know the one that it was before."""
    weight = member._parameters.get("weight")
    if isinstance(weight, Float8Weight) and weight.is_held and weight.requires_grad and torch.is_grad_enabled():
        raise unwritable("Training")


def _is_called_otherwise(member: nn.Linear) -> bool:
    """Whether a call of a layer is more than its forward."""
    is_watched = has_hooks(member) or torch.nn.modules.module._has_any_global_hook()
    return is_watched or "forward" in vars(member) or parametrize.is_parametrized(member)


def _run(members: Sequence[nn.Linear], x: Tensor, options: Float8Options) -> tuple[Tensor, ...]:
    weights, biases = [each.weight for each in members], [each.bias for each in members]
    before = None if torch.compiler.is_compiling() else end_recomputation_with
    return scaled_linear(x, weights, biases, options=options, before_output=before)


@dataclass(frozen=True)
class Float8Replacement(Replacement):
    """The class of converted layers; how they multiply is said by their ``Float8Layers``."""

    kernel = KERNEL
    description = KERNEL

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        linear: Any = original

        @functools.wraps(linear.forward)
        def forward(self: nn.Linear, input: Tensor) -> Tensor:
            layers: Float8Layers = vars(self)[ATTRIBUTE]
            return layers(self, input, linear)

        def _save_to_state_dict(self: nn.Linear, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
            linear._save_to_state_dict(self, destination, prefix, keep_vars)
            if prefix + "weight" in destination:  # no parametrization is
                destination[prefix + "weight"] = plain(destination[prefix + "weight"])

        def _apply(self: nn.Linear, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Linear:
            weight = self._parameters.get("weight")
            if isinstance(weight, Float8Weight) and weakref.getweakrefcount(weight):
                gc.collect()  # weights cannot be exchanged with weak references to them, which Dynamo's garbage has
            module: nn.Linear = linear._apply(self, fn, recurse)
            return module

        return {"forward": forward, "_save_to_state_dict": _save_to_state_dict, "_apply": _apply}

    def verify(self, module: nn.Module) -> float:
        return measure_error(module.weight.device, Float8Options())


@functools.cache
def measure_error(device: torch.device, options: Float8Options) -> float:
    """The error of float8 products on a device: of an output and its gradients, relative to their norms.

    Raises:
        Mismatch: If it is more than float8's.
    """
    random = Randoms()
    random.device = torch.device("cpu") if device.type == "meta" else device
    x, weight, upstream = (random(*shape, dtype=torch.bfloat16) for shape in ((48, 64), (32, 64), (48, 32)))
    pairs = []
    with torch.enable_grad():
        for output in (nn.functional.linear(x, weight), scaled_linear(x, [weight], options=options)[0]):
            pairs.append([output.detach(), *torch.autograd.grad(output, (x, weight), upstream.detach())])
    errors = [(got - want).float().norm() / want.float().norm() for want, got in zip(*pairs, strict=True)]
    worst = max(error.item() for error in errors)
    if not worst <= _TOLERANCE:
        raise Mismatch(f"float8 products on {device} differ by {worst:.1e} of their norm, more than {_TOLERANCE}")
    return worst


def find_layers_of(
    model: nn.Module,
    recipe: Float8Recipe,
    heads: Collection[int],
    shared: Sequence[tuple[nn.Module, Collection[str | None]]],
) -> Iterator[tuple[list[nn.Linear], PatchEntry]]:
    """Groups of linear layers of ``model`` and what the report says of them: converted, or left out and why.

    Args:
        model: The model, in its final dtypes.
        recipe: Says which layers to convert.
        heads: Ids of the modules that are LM heads.
        shared: Modules and the names of children that get the same input, as gate and up of a gated MLP.

    Raises:
        ValueError: If a layer that the recipe converts has a dtype without float8 products, or a name or pattern of its
            filter fits no linear layer, or layers should be skipped and none are found.
    """
    names = {module: name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    _check_filter(recipe, names.values())
    layers = find_layers(model)
    if any(recipe.skip_layers) and not layers:
        raise ValueError(f"skip_layers={recipe.skip_layers}: no layers that follow each other were found in the model")
    first, last = recipe.skip_layers
    ends = (*layers[:first], *layers[max(0, len(layers) - last) :])
    skipped = {module for layer in ends for module in layer.modules()}
    parents = {getattr(parent, name): parent for parent, names_ in shared for name in names_ if name}
    groups: dict[Hashable, list[nn.Linear]] = {}
    for module, name in names.items():
        if ATTRIBUTE in vars(module):
            continue
        parent, _, leaf = name.rpartition(".")
        reason = "the fused loss computes its products" if id(module) in heads else None
        reason = reason or _reason_against(module, name, model.get_submodule(parent))
        reason = reason or ("left out by skip_layers" if module in skipped else recipe.reason_against(module, name))
        if reason is not None:
            yield [module], PatchEntry(f"Linear {leaf}", KERNEL, 1, None, reason=reason)
            continue
        if module.weight.dtype not in DTYPES:
            got = f"{module.weight.dtype} of {name!r}"
            raise ValueError(f"fp8 needs weights of bfloat16 or float32, got {got}: set precision='bf16-true'")
        key: Hashable = name
        if module in parents:
            key = id(parents[module])
        elif _ATTENTION & set(leaf.split("_")):
            key = parent, module.in_features
        groups.setdefault(key, []).append(module)
    for members in (each for key, group in groups.items() for each in _parts(key, group, names)):
        structure = "Linear " + " + ".join(names[member].rpartition(".")[2] for member in members)
        sizes = sum(member.out_features for member in members), members[0].in_features
        if recipe.filter == "auto" and is_too_small(*sizes):
            reason = f"{sizes[0]} x {sizes[1]} is too small to benefit"
            yield members, PatchEntry(structure, KERNEL, 1, None, reason=reason)
        else:
            error = measure_error(members[0].weight.device, recipe.options)
            yield members, PatchEntry(structure, KERNEL, 1, f"{recipe}, {sizes[0]} x {sizes[1]}", error)


def _parts(key: Hashable, group: list[nn.Linear], names: Mapping[nn.Linear, str]) -> list[list[nn.Linear]]:
    """Layers that are named as those of attention have one input where there are queries and keys among them."""
    words = {word for member in group for word in names[member].rpartition(".")[2].split("_")}
    is_one = not isinstance(key, tuple) or (_QUERIES & words and _KEYS & words)
    return [group] if is_one else [[member] for member in group]


def _reason_against(module: nn.Linear, name: str, parent: nn.Module) -> str | None:
    leaf = name.rpartition(".")[2]
    if isinstance(parent, nn.MultiheadAttention):
        return "nn.MultiheadAttention multiplies by its weight itself"
    if type(module).forward is not nn.Linear.forward or "forward" in vars(module):
        return "it has a forward of its own"
    if has_hooks(module) or parametrize.is_parametrized(module):
        return "it has hooks or parametrizations"
    if "lora_" in name:
        return "an adapter"
    if leaf in ("gate", "router") and any("expert" in other for other, _ in parent.named_children()):
        return "a router of experts"
    if module.out_features % MULTIPLE or module.in_features % MULTIPLE:
        return f"{module.out_features} x {module.in_features} are not multiples of {MULTIPLE}"
    return None


def _check_filter(recipe: Float8Recipe, names: Collection[str]) -> None:
    if isinstance(recipe.filter, str) or callable(recipe.filter):
        return
    for each in recipe.filter:
        if not fnmatch.filter(names, each) and each not in names:
            raise ValueError(
                f"filter={list(recipe.filter)}: no linear layer of the model has the name or pattern {each!r}"
                + did_you_mean(each, names)
            )


def convert(members: Sequence[nn.Linear], recipe: Float8Recipe) -> Iterator[Callable[[], None]]:
    """Makes linear layers run in float8; returns what undoes it, step by step."""
    layers = Float8Layers(recipe, members)
    for member in members:
        yield partial(setattr, member, "__class__", type(member))
        vars(member)[ATTRIBUTE] = layers
        patched: Any = Float8Replacement().patched_class(type(member))
        member.__class__ = patched
        yield partial(vars(member).pop, ATTRIBUTE)


def _exchange(
    model: nn.Module, members: Collection[nn.Linear], make: Callable[[Tensor], Tensor]
) -> Iterator[tuple[nn.Parameter, list[nn.Linear]]]:
    """Exchanges the weights of ``members``, one for all that share it; not those that other modules hold too.

    Yields the new parameters, and whose they are.
    """
    weights = {id(member.weight): member.weight for member in members}
    owners: dict[int, list[Any]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if id(parameter) in weights:
                owners.setdefault(id(parameter), []).append(module)
    for key, modules in owners.items():
        if all(module in members for module in modules):
            weight = weights[key]
            new = nn.Parameter(make(weight.detach()), requires_grad=weight.requires_grad)
            for module in modules:
                module.weight = new
            yield new, modules


def _dequantize(members: Sequence[nn.Linear]) -> None:
    held = members[0].weight
    if isinstance(held, Float8Weight):
        weight = nn.Parameter(held.dequantize(), requires_grad=held.requires_grad)
        for member in members:
            if member.weight is held:
                member.weight = weight


def hold_frozen(model: nn.Module, *, on_meta: bool = False) -> Iterator[Callable[[], None]]:
    """Holds the frozen weights of converted layers in float8; returns what undoes it."""
    frozen = {
        member
        for layers in converted_layers(model)
        for member in layers.members
        if not member.weight.requires_grad and not isinstance(member.weight, Float8Weight)
        if on_meta or not member.weight.is_meta
    }
    for weight, members in _exchange(model, frozen, Float8Weight.of):
        weight.is_held = True  # type: ignore[attr-defined]  # a Float8Weight
        yield partial(_dequantize, members)


def gather_in_float8(model: nn.Module, num_ranks: int) -> None:
    """Lets FSDP2 gather the weights of layers whose recipe says so in float8.

    It is about to shard ``model`` over so many ranks, and takes only payloads as large on each of them.
    """
    asked = {member for layers in converted_layers(model) if layers.recipe.all_gather for member in layers.members}
    even = {member for member in asked if member.out_features % num_ranks == 0}
    found = list(_exchange(model, {each for each in even if not isinstance(each.weight, DTensor)}, Float8Shard))
    gathered = {member for _, members in found for member in members}
    left_out = {member for member in asked - gathered if not isinstance(member.weight, DTensor)}
    if left_out:
        rows = sorted({member.out_features for member in left_out})
        rank_zero_warn(
            f"all_gather: weights with {rows} rows are gathered in their own dtype, because {num_ranks} ranks do not"
            " divide them, or because layers that do not run in float8 share them"
        )


def layers_of(module: Any) -> Float8Layers | None:
    """What a converted layer runs with, None for other modules and for those whose call is more than their forward."""
    layers: Float8Layers | None = vars(module).get(ATTRIBUTE)
    return None if layers is None or _is_called_otherwise(module) else layers
