"""``fp8=``: which linear layers multiply in float8, and how."""

import fnmatch
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from liger_ops.arguments import check_bool, check_choice, check_integer, wrong_type, wrong_value
from liger_ops.fp8.products import Float8Options, unsupported

ATTRIBUTE = "liger_float8"
"""Of converted layers, how they run."""
Filter = Literal["auto"] | list[str] | Callable[[nn.Module, str], bool]
"""``"auto"`` by size, names of modules or patterns of them (``"*.mlp.*"``), or a function of a module and its name."""


@dataclass(frozen=True)
class Float8Recipe:
    """How linear layers are trained in float8 (e4m3), with power-of-two scales per row, computed from the data.

    Weights, gradients, optimizer states and checkpoints keep their dtypes; nothing is added to them. See docs/fp8.md.

    Args:
        scaling: ``"rowwise"``: a scale per token, and per output channel of a weight.
        high_precision_wgrad: Whether weight gradients are computed in the dtype of the model.
        fast_accum: Whether the products for outputs, gradients of inputs and of weights use fast accumulation, which
            loses precision in long sums; of outputs at most for 8192 terms.
        filter: The layers to convert, out of those that can be; ``"auto"`` excludes those too small to benefit.
        skip_layers: How many of the first and of the last layers of the model to exclude.
        min_tokens: Calls with fewer tokens multiply in the dtype of the model. ``"auto"``: 2048, and with
            ``filter="auto"`` more if layers are small, where Python takes longer for further kernels than they save.
        save: ``"fp8"`` keeps the gate and up projections of gated MLPs for backward in float8: less memory, and
            gradients with one additional rounding.
        evaluate: Whether modules in eval mode use float8 too.
        hold_frozen: Whether weights that are frozen stay in memory in float8 only; ``"auto"``: under strategies that do
            not shard parameters. Checkpoints then hold these values, which float8 represents exactly.
        all_gather: Whether FSDP2 (``liger_model_parallel``) gathers weights in float8, half the bytes, if the number of
            ranks divides their rows: it pays where communication is slow. Evaluation and small calls then multiply by
            these rounded weights too.
        emulate: Whether products run in float32 on GPUs too, for tests.

    Raises:
        TypeError: For an argument of a wrong type.
        ValueError: For an unknown choice or a negative number.
    """

    scaling: Literal["rowwise"] = "rowwise"
    high_precision_wgrad: bool = False
    fast_accum: tuple[bool, bool, bool] = (True, False, False)
    filter: Filter = "auto"
    skip_layers: tuple[int, int] = (0, 0)
    min_tokens: int | Literal["auto"] = "auto"
    save: Literal["auto", "fp8"] = "auto"
    evaluate: bool = False
    hold_frozen: Literal["auto"] | bool = "auto"
    all_gather: bool = False
    emulate: bool = False

    def __post_init__(self) -> None:
        check_choice("scaling", self.scaling, ("rowwise",))
        check_choice("save", self.save, ("auto", "fp8"))
        check_choice("hold_frozen", self.hold_frozen, ("auto", True, False))
        for name in ("high_precision_wgrad", "evaluate", "all_gather", "emulate"):
            check_bool(name, getattr(self, name))
        if self.min_tokens != "auto":
            check_integer("min_tokens", self.min_tokens, at_least=1)
        for name, size, kind in (("fast_accum", 3, bool), ("skip_layers", 2, int)):
            value = getattr(self, name)
            is_right = isinstance(value, Sequence) and len(value) == size and all(type(each) is kind for each in value)
            if not is_right or (kind is int and min(value) < 0):
                raise wrong_value(name, f"{size} values of type {kind.__name__}, at least 0", value)
            object.__setattr__(self, name, tuple(value))  # of yaml, a list
        if isinstance(self.filter, list | tuple) and all(isinstance(each, str) for each in self.filter):
            object.__setattr__(self, "filter", tuple(self.filter))
        elif self.filter != "auto" and not callable(self.filter):
            expected = "'auto', a list of names or patterns, or a function of a module and its name"
            raise wrong_type("filter", expected, self.filter)

    @property
    def options(self) -> Float8Options:
        """What the ops need to know."""
        return Float8Options(self.fast_accum, self.high_precision_wgrad, self.save == "fp8", self.emulate)

    def __str__(self) -> str:
        return "fp8 rowwise_with_gw_hp" if self.high_precision_wgrad else f"fp8 {self.scaling}"

    def reason_against(self, module: nn.Linear, name: str) -> str | None:
        """Why the filter leaves out a layer by its name, None if it does not; ``"auto"`` looks at sizes elsewhere."""
        if self.filter == "auto":
            return None
        if callable(self.filter):
            return None if self.filter(module, name) else "left out by filter"
        patterns: Any = self.filter
        is_named = any(name == each or fnmatch.fnmatchcase(name, each) for each in patterns)
        return None if is_named else "no name or pattern in filter matches it"


Float8Choice = bool | Literal["auto", "rowwise", "rowwise_with_gw_hp"] | Float8Recipe | None
"""True and ``"auto"`` stand for ``"rowwise"``, the default recipe; None and False for no float8."""

RECIPES = {
    "auto": Float8Recipe(),
    "rowwise": Float8Recipe(),
    "rowwise_with_gw_hp": Float8Recipe(high_precision_wgrad=True),
}


def check_float8(fp8: Any) -> Float8Recipe | None:
    """The recipe that ``fp8`` stands for, None for none; raises for anything else."""
    if fp8 is None or fp8 is False:
        return None
    if isinstance(fp8, Float8Recipe):
        return fp8
    if not isinstance(fp8, str | bool):
        raise wrong_type("fp8", f"True, False, one of {list(RECIPES)} or a Float8Recipe", fp8)
    name = "auto" if fp8 is True else fp8
    check_choice("fp8", name, RECIPES)
    return RECIPES[str(name)]


def check_device(recipe: Float8Recipe, device: torch.device) -> None:
    """Raises ValueError if a device does not have the products of a recipe."""
    reason = None if recipe.emulate else unsupported(device)
    if reason is not None:
        raise ValueError(f"fp8={recipe} is not supported on {device}: {reason}")


_FLOPS_PER_BYTE = 128
"""Multiplications saved in the time of a byte moved, with a margin: an H200 saves 6 * out * in FLOPs per token at the
difference of 660 and 1230 TFLOP/s, and moves 6 bytes for each input and 5 for each output at 4 TB/s."""
_LEAST_WEIGHTS = 2**23
"""Layers with fewer weights take less time on the GPU than Python needs for their further kernels."""


MIN_TOKENS = 2048
_LEAST_PRODUCTS = 3e11
"""Tokens times weights of a decoder layer: its products then save a millisecond on an H200. A step of Llama 3.2 1B, 50M
such weights, is slower with float8 for 4096 tokens, and faster for 8192 (``train_llama3_1b_few_tokens_h200.jsonl``)."""


def with_min_tokens(recipe: Float8Recipe, num_weights: int, num_layers: int) -> Float8Recipe:
    """The recipe with a number of tokens, for a model with so many decoder layers and weights that it converts."""
    if recipe.min_tokens != "auto":
        return recipe
    is_chosen = recipe.filter != "auto" or not num_weights
    least = 0 if is_chosen else math.ceil(_LEAST_PRODUCTS * max(1, num_layers) / num_weights)
    return replace(recipe, min_tokens=max(MIN_TOKENS, least))


def is_too_small(out_features: int, in_features: int) -> bool:
    """Whether layers of this size, which share their input, gain nothing: casts take as long as they save."""
    num_weights = out_features * in_features
    return num_weights < max(_LEAST_WEIGHTS, _FLOPS_PER_BYTE * (6 * in_features + 5 * out_features))


def fp8_share(model: nn.Module) -> float | None:
    """The share of the FLOPs of converted layers' calls that ran in float8; None before any call."""
    return share_of(converted_layers(model))


def share_of(converted: Sequence[Any]) -> float | None:
    """The same of what :func:`converted_layers` found."""
    in_float8, others = map(sum, zip((0, 0), *(layers.take_products() for layers in converted), strict=True))
    return in_float8 / (in_float8 + others) if in_float8 + others else None


def converted_layers(model: nn.Module) -> list[Any]:
    """The :class:`~lightning_liger.patching.rules.linear.Float8Layers` in ``model``, each once."""
    found = [vars(module)[ATTRIBUTE] for module in model.modules() if ATTRIBUTE in vars(module)]
    return list({id(layers): layers for layers in found}.values())
