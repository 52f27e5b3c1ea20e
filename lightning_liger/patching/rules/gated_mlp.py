"""Gated MLPs: SwiGLU, GeGLU and squared ReLU, of separate and of packed projections.

Which projection is the gate, which activation it has and where a dropout is, is found by comparing outputs and
gradients. The comparison replaces projections by cheap random linear maps of their sizes, so it costs nothing even
where a weight has a hundred million elements, and projections that a user replaced (an adapter, quantized weights) do
not prevent it.
"""

import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from liger_ops import gelu_mul, relu_squared, relu_squared_mul, silu_mul
from liger_ops.fp8.gated_mlp import scaled_gated_mlp
from lightning_liger.activations.frames import end_recomputation_with
from lightning_liger.activations.tiles import may_run_in_tiles, run_in_tiles
from lightning_liger.patching.rules.base import (
    NUM_PROBE_TOKENS,
    Randoms,
    Replacement,
    Rule,
    children_of,
    compare_calls,
    forward_of_tensors,
    has_hooks_besides,
    has_state,
    own_dtype,
    probe_of,
    takes_one_tensor,
)
from lightning_liger.patching.rules.linear import layers_of
from lightning_liger.patching.verify import Rejected, trial

_GATES: dict[str, Callable[..., Tensor]] = {
    "silu_mul": silu_mul,
    "gelu_mul": gelu_mul,
    "gelu_mul (tanh)": partial(gelu_mul, approximate="tanh"),
    "relu_squared_mul": relu_squared_mul,
}
_FLOAT8_ACTIVATIONS = {
    "silu_mul": "silu",
    "gelu_mul": "gelu",
    "gelu_mul (tanh)": "gelu_tanh",
    "relu_squared_mul": "relu_squared",
}
_KERNELS = ("silu_mul", "gelu_mul", "relu_squared")
_PROBES: tuple[tuple[torch.dtype | None, float], ...] = ((torch.float32, 1.0), (torch.float32, 1e3), (None, 1.0))
"""Dtypes and sizes of inputs: float32 tells activations apart, large values show clamps; the module's own come last."""


@dataclass(frozen=True)
class MLPReplacement(Replacement):
    """``down(activation(gate(x)) * up(x))``, with a dropout before or after ``down``, both or none.

    SwiGLU may have constant factors that the module holds, of the gate inside the activation and of the output.
    """

    gate: str  # name of the child; the packed projection if ``up`` is None
    up: str | None
    down: str
    activation: str  # a key of ``_GATES``, or "relu_squared" without a second factor
    up_first: bool = False  # whether the gate is the second half of a packed projection
    inner_dropout: str | None = None
    outer_dropout: str | None = None
    gate_multiplier: str | None = None  # names of attributes
    output_multiplier: str | None = None

    @property
    def kernel(self) -> str:
        return next(kernel for kernel in _KERNELS if self.activation.startswith(kernel))

    @property
    def description(self) -> str:
        names = (self.gate_multiplier, self.output_multiplier)
        scaled = ", scaled" if any(names) else ""
        return self.activation + (", packed" if self.up is None and self.activation != "relu_squared" else "") + scaled

    @property
    def _called(self) -> set[str | None]:
        return {self.gate, self.up, self.down, self.inner_dropout, self.outer_dropout}

    @property
    def reads(self) -> Collection[str | None]:
        return self._called | {self.gate_multiplier, self.output_multiplier}

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        called = self._called

        def run(module: nn.Module, x: Tensor) -> Tensor:
            return original.forward(module, x) if has_hooks_besides(module, called) else self._run(module, x)

        return {"forward": forward_of_tensors(original, run)}

    def _run(self, module: nn.Module, x: Tensor) -> Tensor:
        sizes = _sizes(getattr(module, self.down)) if may_run_in_tiles() else None
        return self._compute(module, x) if sizes is None else run_in_tiles(self._compute, module, x, width=sizes[0])

    def _compute(self, module: nn.Module, x: Tensor) -> Tensor:
        hidden = self._compute_in_float8(module, x)
        if hidden is not None:
            return hidden if self.outer_dropout is None else getattr(module, self.outer_dropout)(hidden)
        unit = _GATES.get(self.activation, relu_squared)
        if self.gate_multiplier is not None:
            unit = partial(silu_mul, gate_multiplier=getattr(module, self.gate_multiplier))
        if self.up_first:
            up, gate = getattr(module, self.gate)(x).chunk(2, dim=-1)
            hidden = unit(gate, up)
        else:
            hidden = unit(*(getattr(module, name)(x) for name in (self.gate, self.up) if name is not None))
        for name in (self.inner_dropout, self.down, self.outer_dropout):
            hidden = hidden if name is None else getattr(module, name)(hidden)
        return hidden if self.output_multiplier is None else hidden * getattr(module, self.output_multiplier)

    def _compute_in_float8(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """The output of ``down``, if all projections are converted by one recipe and have no biases, else None."""
        first = layers_of(getattr(module, self.gate))
        if first is None or first.has_few_tokens(x):
            return None
        if self.gate_multiplier is not None or self.output_multiplier is not None:
            return None
        activation = _FLOAT8_ACTIVATIONS.get(self.activation)
        inputs = [getattr(module, name) for name in (self.gate, self.up) if name is not None]
        down = getattr(module, self.down)
        last = layers_of(down)
        if activation is None or last is None or self.inner_dropout is not None:
            return None
        projections = [*inputs, down]
        options = first.recipe.options
        if (
            (first.recipe is not last.recipe and first.recipe != last.recipe)
            or options.high_precision_wgrad
            or any(layers_of(each) is not first for each in inputs)
            or any(each.bias is not None for each in projections)
            or not first.applies_to(x, projections)
        ):
            return None
        first.count(x, projections, True)
        return scaled_gated_mlp(
            x,
            [each.weight for each in inputs],
            down.weight,
            activation,
            up_first=self.up_first,
            options=options,
            before_output=None if torch.compiler.is_compiling() else end_recomputation_with,
        )

    def verify(self, module: nn.Module) -> float:
        return [self._compare(module, dtype, size) for dtype, size in _PROBES][-1]

    def _compare(self, module: nn.Module, dtype: torch.dtype | None, size: float) -> float:
        random, own = Randoms(module), own_dtype(module)
        children = children_of(module).items()
        stand_ins = {name: _stand_in(child, dtype or own_dtype(child, own), random) for name, child in children}
        probe = probe_of(module, **stand_ins)
        width = getattr(probe, self.gate).in_features
        x = random(1, NUM_PROBE_TOKENS, width, dtype=dtype or own, scale=size)
        return compare_calls(probe, self._run, [x], [x])


def _stand_in(child: nn.Module, dtype: torch.dtype, random: Randoms) -> nn.Module:
    """A cheap random linear map instead of a projection, a probe of any other child; every dropout drops half."""
    sizes = _sizes(child)
    if sizes is not None:
        return _Sketch(*sizes, dtype, random)
    # Where a dropout is shows even if the module's own drops nothing.
    return probe_of(child, **({"p": 0.5} if isinstance(child, nn.Dropout) else {}))


class _Sketch(nn.Module):
    """A random linear map of a projection's sizes: every input is used, every output differs."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype, random: Randoms) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.spread = out_features >= in_features
        larger, smaller = max(in_features, out_features), min(in_features, out_features)
        order = torch.randperm(larger, generator=random.generator, device="cpu") % smaller
        self.index = order.to(random.device)
        self.scale = random(larger, dtype=dtype).detach()
        self.weight = torch.empty(0, dtype=dtype, device=random.device)  # some forwards ask for its dtype

    def forward(self, x: Tensor) -> Tensor:
        if self.spread:
            return x[..., self.index] * self.scale
        return x.new_zeros(*x.shape[:-1], self.out_features).index_add(-1, self.index, x * self.scale)


def _sizes(child: Any) -> tuple[int, int] | None:
    """``in_features`` and ``out_features`` of a projection of any class, None for other modules."""
    in_features, out_features = getattr(child, "in_features", None), getattr(child, "out_features", None)
    if isinstance(in_features, int) and isinstance(out_features, int) and min(in_features, out_features) > 0:
        return in_features, out_features
    weight = getattr(child, "weight", None)
    if type(child).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.dim() == 2:
        return weight.shape[0], weight.shape[1]
    return None


class MLPRule(Rule):
    """Modules of two or three projections, from the hidden size and back to it, that take one tensor."""

    kernels = _KERNELS

    def candidates(self, module: nn.Module) -> Sequence[Replacement] | str | None:
        children = dict(module.named_children())
        sizes = {name: size for name, child in children.items() if (size := _sizes(child)) is not None}
        others = [child for name, child in children.items() if name not in sizes]
        own_tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if len(sizes) not in (2, 3) or own_tensors or isinstance(module, nn.ModuleList | nn.ModuleDict):
            return None
        if not takes_one_tensor(module) or any(True for child in others for _ in child.children()):
            return None
        # Attention has projections of the same sizes, but no activation, and its forward has more parameters.
        is_simple = not others and len(inspect.signature(module.forward).parameters) == 1
        activations = _activations(module)
        if not is_simple and not activations:
            return None
        dropouts = [name for name, child in children.items() if isinstance(child, nn.Dropout)]
        # What may be before and after the down projection; the most common first.
        places = dict.fromkeys(itertools.permutations([*dropouts, None, None], 2))
        pairs = list(itertools.product(_mlps(sizes, activations), places))
        found = [replace(mlp, inner_dropout=inner, outer_dropout=outer) for mlp, (inner, outer) in pairs]
        factors = [name for name, value in vars(module).items() if type(value) is float and value != 1.0]
        scaled = itertools.permutations([*factors, None][:2]) if len(factors) in (1, 2) else ()
        multiplied = itertools.product(found, list(scaled))
        found += [
            replace(mlp, gate_multiplier=gate, output_multiplier=output)
            for mlp, (gate, output) in multiplied
            if mlp.activation == "silu_mul"
        ]
        if found and has_state(others):
            return "what is between its projections has parameters or buffers"
        return found or None


_INPUTS = torch.linspace(-2.0, 2.0, 9, dtype=torch.float32, device="cpu")


def _activations(module: nn.Module) -> list[Tensor]:
    """The values for ``_INPUTS`` of each elementwise function among the module's attributes and children."""
    values = []
    for function in (*vars(module).values(), *module.children()):
        if callable(function) and not isinstance(function, type | nn.Dropout | nn.Identity) and not _sizes(function):
            try:
                with trial():
                    y = function.forward(_INPUTS) if isinstance(function, nn.Module) else function(_INPUTS)
            except Rejected:
                continue
            if isinstance(y, Tensor) and y.shape == _INPUTS.shape:
                values.append(y)
    return values


def _mlps(sizes: dict[str, tuple[int, int]], activations: list[Tensor]) -> Iterator[MLPReplacement]:
    """All MLPs of projections with these names and sizes; first those with an activation of these values."""
    ones = torch.ones_like(_INPUTS)
    known = [
        name for name, gate in _GATES.items() if any(torch.allclose(gate(_INPUTS, ones), each) for each in activations)
    ]
    gates = list(dict.fromkeys((*known, *_GATES)))
    for down in reversed(sizes):
        others = [name for name in sizes if name != down]
        hidden_size, width = sizes[down][1], sizes[down][0]
        if any(sizes[name][0] != hidden_size for name in others):
            continue
        if len(others) == 2 and all(sizes[name][1] == width for name in others):
            for (gate, up), activation in itertools.product(itertools.permutations(others), gates):
                yield MLPReplacement(gate, up, down, activation)
        elif len(others) == 1 and sizes[others[0]][1] == 2 * width:
            for up_first, activation in itertools.product((False, True), gates):
                yield MLPReplacement(others[0], None, down, activation, up_first)
        elif len(others) == 1 and sizes[others[0]][1] == width and "relu_squared_mul" in known:
            yield MLPReplacement(others[0], None, down, "relu_squared")
