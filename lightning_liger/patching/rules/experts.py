"""Experts whose weights are two tensors of three dimensions, for tokens that a router already chose them for.

Layout, activation, limits and the order of the gate's features are found by comparing outputs and all gradients on a
copy with few small experts, which costs nothing however large the weights are. Constants are numbers among the module's
attributes. Routers stay as they are: only the experts' own forward is replaced.
"""

import copy
import inspect
import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from liger_ops.moe.exchange import ExpertGroup
from liger_ops.moe.experts import moe_experts
from lightning_liger.patching.rules.base import (
    Randoms,
    Replacement,
    Rule,
    compare_calls,
    forward_of_tensors,
    has_hooks_besides,
    has_state,
    own_dtype,
    probe_of,
)

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu_squared")
_MAX_COPY = 2**22  # elements of a weight that is small enough to be copied as it is
_SCALES = (1.0, 30.0)
"""Of inputs; large values show limits."""
_INDEX = torch.tensor([[0, 1], [3, 1], [1, 1], [4, 0], [0, 6], [1, 5], [3, 4]])
"""Experts of tokens: one has none, one occurs twice in a token; the last two are there where experts may be none."""
_ADAPTERS = "liger_adapters"
_GROUP = "liger_expert_group"


def share_experts(experts: nn.Module, group: ExpertGroup) -> None:
    """Has replaced ``experts``, whose parameters are DTensors sharded over the ranks of ``group``, exchange tokens."""
    vars(experts)[_GROUP] = group


def group_of(experts: nn.Module) -> ExpertGroup | None:
    """The ranks that share ``experts``, None if each rank has all of them."""
    return getattr(experts, _GROUP, None)


@contextmanager
def adapted(experts: nn.Module, adapter: Any) -> Iterator[None]:
    """Has the forward of ``experts`` inside add the update of an adapter of peft to one of its weights."""
    before = _adapters_of(experts)
    vars(experts)[_ADAPTERS] = (*before, adapter)  # no submodule, and read by compiled code too
    try:
        yield
    finally:
        vars(experts)[_ADAPTERS] = before


def _adapters_of(experts: nn.Module) -> tuple[Any, ...]:
    return getattr(experts, _ADAPTERS, ())


@dataclass(frozen=True)
class ExpertsReplacement(Replacement):
    """Names of the parameters, and the options of :func:`liger_ops.moe_experts`."""

    num_tensors: ClassVar[int] = 3
    gate_up: str
    down: str
    gate_up_bias: str | None
    down_bias: str | None
    activation: str
    transposed: bool
    interleaved: bool = False
    limit: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0
    limit_output: bool = False
    has_identity: bool = False  # whether experts beyond those of down return their tokens

    @property
    def kernel(self) -> str:
        return "moe_experts"

    @property
    def description(self) -> str:
        parts = [f"moe_experts, {self.activation}"]
        parts += [name for name in ("transposed", "interleaved") if getattr(self, name)]
        parts += [] if self.limit is None else [f"limit {self.limit:g}"]
        parts += [] if self.alpha == 1.0 or self.limit is not None else [f"alpha {self.alpha:g}"]
        return ", ".join(parts)

    @property
    def reads(self) -> Collection[str | None]:
        return {self.gate_up, self.down, self.gate_up_bias, self.down_bias}

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        def run(module: nn.Module, *tensors: Tensor) -> Any:
            return self.run(module, *tensors) if self._applies(module, *tensors) else run_original(module, *tensors)

        def run_original(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if group_of(module) is not None:
                raise RuntimeError(
                    f"{type(module).__name__} is split over ranks by expert_parallel_size, and runs with plain tensors"
                    f" of tokens, experts and weights only, adapters of its weights without hooks: got {len(args)}"
                    f" arguments and {sorted(kwargs)}"
                )
            with ExitStack() as stack:
                for adapter in _adapters_of(module):  # as peft does it: its weight includes the update
                    stack.enter_context(adapter.liger_original._activate_lora(adapter, adapter.active_adapters))
                return original.forward(module, *args, **kwargs)

        return {"forward": forward_of_tensors(original, run, self.num_tensors, run_original)}

    def _applies(self, module: nn.Module, *tensors: Tensor) -> bool:
        is_split = group_of(module) is not None  # into DTensors, whose local parts run
        weights = [] if is_split else [getattr(module, name) for name in (self.gate_up, self.down)]
        for adapter in _adapters_of(module):
            weights += [*adapter.lora_A.parameters(), *adapter.lora_B.parameters()]
        is_plain = all(type(each) in (Tensor, nn.Parameter) for each in weights)
        if not is_plain or has_hooks_besides(module):
            return False
        # The reference for CPUs asks for numbers, which cannot be compiled.
        return is_split or weights[0].is_cuda or not torch.compiler.is_compiling()

    def run(self, module: nn.Module, *tensors: Tensor) -> Tensor:
        """What the module computes."""
        x, index, weights = tensors
        names = self.gate_up, self.down, self.gate_up_bias, self.down_bias
        own: list[Any] = [None if name is None else getattr(module, name) for name in names]
        gate_up, down, *biases = (each.to_local() if isinstance(each, DTensor) else each for each in own)
        num_experts, group = down.shape[0], group_of(module)
        y = moe_experts(
            x,
            gate_up[:num_experts] if self.has_identity else gate_up,
            down,
            index,
            weights,
            activation=self.activation,
            gate_up_bias=biases[0],
            down_bias=biases[1],
            limit=self.limit,
            alpha=self.alpha,
            up_offset=self.up_offset,
            limit_output=self.limit_output,
            interleaved=self.interleaved,
            transposed=self.transposed,
            gate_up_adapter=self._adapter(module, self.gate_up, num_experts),
            down_adapter=self._adapter(module, self.down, num_experts),
            group=group,
        )
        if not self.has_identity:
            return y
        return y + (x * weights.where(index >= num_experts, 0.0).sum(-1, keepdim=True)).to(y.dtype)

    def _adapter(self, module: nn.Module, name: str, num_experts: int) -> tuple[Tensor, Tensor] | None:
        """The updates of a weight by all its active adapters: as one, of the sum of their ranks."""
        ours = [each for each in _adapters_of(module) if each.parameter_name == name]
        found = [
            each.get_delta_factors(active) for each in ours for active in each.active_adapters if active in each.lora_A
        ]
        if not found:
            return None
        factors = [
            (left.mT, right.mT, scale) if self.transposed else (right, left, scale) for left, right, scale in found
        ]
        a, b = torch.cat([a for a, _, _ in factors], dim=1), torch.cat([b * scale for _, b, scale in factors], dim=2)
        if (group := group_of(module)) is None:
            return a[:num_experts], b[:num_experts]
        size, first = group.ranks.size(), group.ranks.rank() * num_experts
        a, b = a[first : first + num_experts], b[first : first + num_experts]
        for each in (a, b):
            if each.requires_grad:  # of tensors that all ranks have, whose gradients are averaged over all
                each.register_hook(lambda gradient: gradient * size)
        return a, b

    def verify(self, module: nn.Module) -> float:
        # On the CPU first, so that a GPU compiles kernels for the candidate that fits only.
        for scale in _SCALES:
            self._compare(module, Randoms(), torch.float32, scale)
        return self._compare(module, Randoms(module), own_dtype(module), 1.0)

    def _compare(self, module: nn.Module, random: Randoms, dtype: torch.dtype, scale: float) -> float:
        probe, tensors = self.small_call(module, random, dtype, scale)
        leaves = [each for each in (*tensors, *probe.parameters(recurse=False)) if each.requires_grad]
        return compare_calls(probe, self.run, tensors, leaves)

    def small_call(
        self, module: nn.Module, random: Randoms, dtype: torch.dtype, scale: float
    ) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """A small copy of the module, and arguments for it."""
        probe = _small_copy(module, self, random, dtype)
        down = getattr(probe, self.down)
        hidden_size = down.shape[-1 if self.transposed else -2]
        if self.num_tensors == 1:
            x = random(4 * down.shape[0], hidden_size, dtype=dtype, scale=scale)
            is_zero = torch.arange(len(x), device=x.device)[:, None] % 3 == 0
            return probe, (x.detach().masked_fill(is_zero, 0.0).requires_grad_(),)
        x = random(len(_INDEX), hidden_size, dtype=dtype, scale=scale)
        index = _INDEX.to(random.device).clamp(max=getattr(probe, self.gate_up).shape[0] - 1)
        return probe, (x, index, random(*_INDEX.shape, dtype=dtype))


def _small_copy(module: nn.Module, replacement: ExpertsReplacement, random: Randoms, dtype: torch.dtype) -> Any:
    """A copy of the module with few small experts of random weights, which run one after another."""
    num_experts, hidden_size, width = _sizes(getattr(module, replacement.down), replacement.transposed)
    sizes = {num_experts: 5, hidden_size: 24, width: 16, 2 * width: 32}
    gate_up = getattr(module, replacement.gate_up)
    if replacement.has_identity:
        sizes |= {gate_up.shape[0]: 7, gate_up.shape[0] - num_experts: 2}
    if len(sizes) < (6 if replacement.has_identity else 4):  # one size would stand for two
        sizes = {}
        if gate_up.numel() > _MAX_COPY:
            raise ValueError(f"its sizes are not different: {num_experts} experts, {hidden_size} to {width} features")
    replaced: dict[str, Any] = {
        name: nn.Parameter(
            random(*(sizes.get(size, size) for size in parameter.shape), dtype=dtype, scale=0.3).detach()
        )
        for name, parameter in module.named_parameters(recurse=False)
    }
    for name, value in vars(module).items():
        if type(value) is int and value in sizes:
            replaced[name] = sizes[value]
    config = getattr(module, "config", None)
    if config is not None and hasattr(config, "_experts_implementation"):
        replaced["config"] = copy.copy(config)
        replaced["config"]._experts_implementation = "eager"
    return probe_of(module, **replaced)


def _sizes(down: Tensor, transposed: bool) -> tuple[int, int, int]:
    """Numbers of experts, of features of tokens, and of features inside."""
    num_experts, hidden_size, width = down.mT.shape if transposed else down.shape
    return num_experts, hidden_size, width


@dataclass(frozen=True)
class AllTokensReplacement(ExpertsReplacement):
    """Experts that each get all tokens, ``[num_experts * num_tokens, hidden_size]``, of which most are 0.

    A token that is 0 adds nothing to outputs and gradients, so it needs no expert: these have no biases, and their
    activations are 0 at 0.
    """

    num_tensors: ClassVar[int] = 1

    @property
    def description(self) -> str:
        return f"{super().description}, tokens that are not 0"

    def _applies(self, module: nn.Module, *tensors: Tensor) -> bool:
        (x,) = tensors
        fits = x.dim() == 2 and x.shape[0] % getattr(module, self.down).shape[0] == 0
        return fits and super()._applies(module)

    def run(self, module: nn.Module, *tensors: Tensor) -> Tensor:
        (x,) = tensors
        num_experts = getattr(module, self.down).shape[0]
        expert = torch.arange(num_experts, device=x.device).repeat_interleave(x.shape[0] // num_experts)
        index = torch.where((x != 0).any(-1), expert, -1).unsqueeze(-1)
        return super().run(module, x, index, torch.ones_like(index, dtype=x.dtype))


class ExpertsRule(Rule):
    """Modules of two weights ``[num_experts, ., .]`` that fit together, with or without two biases."""

    kernels = ("moe_experts",)

    def candidates(self, module: nn.Module) -> Sequence[Replacement] | str | None:
        own = dict(module.named_parameters(recurse=False))
        weights = {name: each for name, each in own.items() if each.dim() == 3 and each.is_floating_point()}
        arguments = inspect.signature(module.forward).parameters
        if len(weights) != 2 or len(arguments) not in (1, 3):
            return None
        if any(name not in weights and each.dim() != 2 for name, each in own.items()):
            return "it has parameters other than weights and biases"
        if has_state(module.children()):
            return "its activation has parameters or buffers"
        layouts = list(_layouts(weights, {name: each for name, each in own.items() if name not in weights}))
        if not layouts:
            return "the shapes of its weights are inconsistent"
        if len(arguments) == 1 and (len(own) != 2 or any(names["has_identity"] for names, _ in layouts)):
            return "its experts get all tokens, and have biases"
        kind = ExpertsReplacement if len(arguments) == 3 else AllTokensReplacement
        return [kind(**names, **gate) for names, is_gated in layouts for gate in _gates(module, is_gated)]


def _layouts(
    weights: dict[str, nn.Parameter], biases: dict[str, nn.Parameter]
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Names of parameters and whether weights are transposed, for each way in which shapes fit; whether there is up."""
    for (first, second), transposed in itertools.product(itertools.permutations(weights), (False, True)):
        num_experts, hidden_size, width = _sizes(weights[second], transposed)
        inner = weights[first].mT if transposed else weights[first]
        fits = inner.shape[2] == hidden_size and inner.shape[1] in (width, 2 * width)
        if not fits or inner.shape[0] < num_experts:
            continue
        fitting: list[list[str | None]] = [
            [name for name, each in biases.items() if each.shape == (num_experts, size)] or [None]
            for size in (inner.shape[1], hidden_size)
        ]
        has_identity = inner.shape[0] > num_experts
        for found in itertools.product(*fitting):
            if len(set(found) - {None}) == len(biases):
                biased = {"gate_up_bias": found[0], "down_bias": found[1], "has_identity": has_identity}
                names = {"gate_up": first, "down": second, "transposed": transposed, **biased}
                yield names, inner.shape[1] == 2 * width


def _gates(module: nn.Module, is_gated: bool) -> list[dict[str, Any]]:
    """Options of the gate, the most common first, then by how many of the numbers among attributes they use."""
    numbers = {float(each) for each in vars(module).values() if type(each) is float and each > 0}
    limits = [(None, False), *itertools.product(sorted(numbers), (False, True))] if is_gated else [(None, False)]
    parts = (False, True) if is_gated else (False,)
    alphas = sorted({1.0, 1.702} | numbers)  # 1.702 is that of quick GELU
    first, *others = [
        {
            "activation": activation,
            "limit": limit,
            "limit_output": limit_output,
            "alpha": alpha,
            "up_offset": float(offset),
            "interleaved": interleaved,
        }
        for offset, interleaved, (limit, limit_output) in itertools.product(parts, parts, limits)
        for activation in _ACTIVATIONS
        for alpha in (alphas if activation == "silu" else [1.0])
    ]
    return [first, *sorted(others, key=lambda gate: len(numbers - {gate["limit"], gate["alpha"]}))]
