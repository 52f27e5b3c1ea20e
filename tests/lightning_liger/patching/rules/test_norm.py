"""Norms are found whatever they are called and however they are written; what resembles them is left alone."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_liger import apply_liger_kernels
from lightning_liger.patching.rules import Patched
from lightning_liger.patching.rules import norm as norms
from tests.lightning_liger.patching.rules.comparing import (
    assert_kept,
    assert_replaced,
    assert_same,
    fill,
    patched_twin,
)

HIDDEN_SIZE = 24
LLAMA, GEMMA, OFFSET = "rms_norm (llama casting)", "rms_norm (gemma casting)", "rms_norm (gemma casting, offset 1)"


def rstd(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class WeightedNorm(nn.Module):
    """A weight and an eps, for the classes below to use."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN_SIZE))
        self.eps = eps


class BiasedNorm(WeightedNorm):
    """With a bias as well."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__(eps)
        self.bias = nn.Parameter(torch.zeros(HIDDEN_SIZE))


class LlamaForm(nn.Module):
    """Rounds before the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(HIDDEN_SIZE))
        self.variance_epsilon = 1e-5

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        return self.gain * (wide * rstd(wide, self.variance_epsilon)).to(hidden_states.dtype)


class PowerNorm(nn.Module):
    """The inverse root as a power."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(HIDDEN_SIZE))
        self.tiny = 1e-6

    def forward(self, inputs: Tensor) -> Tensor:
        wide = inputs.float()
        return self.g * (wide * (wide.square().mean(dim=-1, keepdim=True) + self.tiny).pow(-0.5)).type_as(inputs)


class GemmaForm(nn.Module):
    """Weights stored as deviations from one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(HIDDEN_SIZE))
        self.epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * rstd(wide, self.epsilon) * (1.0 + self.scale.float())).type_as(x)


class Olmo2Form(WeightedNorm):
    """Rounds after the weight."""

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        return (self.weight * (wide * rstd(wide, self.eps))).to(hidden.dtype)


class DividingNorm(WeightedNorm):
    """Divides by the root, all in the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class PlainOnePlusNorm(WeightedNorm):
    """One plus the weight, all in the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return x * rstd(x, self.eps) * (1 + self.weight)


class FunctionalNorm(WeightedNorm):
    """PyTorch's own function."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (HIDDEN_SIZE,), self.weight, self.eps)


class Weightless(nn.Module):
    """Only an eps, under a name that no norm has."""

    def __init__(self) -> None:
        super().__init__()
        self.e = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * rstd(wide, self.e)).type_as(x)


class EpsInCodeNorm(nn.Module):
    """eps is not an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(HIDDEN_SIZE))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.w * (wide * rstd(wide, 1e-6)).to(x.dtype)


class EpsOfClassNorm(nn.Module):
    """eps is the class's, and there is no weight."""

    eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return x * rstd(x, self.eps)


class TwoFloatsNorm(WeightedNorm):
    """eps is the second of two small numbers."""

    def __init__(self) -> None:
        super().__init__()
        del self.eps
        self.init_std = 2e-3
        self.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return x * rstd(x, self.eps) * self.weight


class CohereForm(WeightedNorm):
    """A LayerNorm without a bias, by hand."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        centered = wide - wide.mean(-1, keepdim=True)
        normalized = centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * normalized).to(hidden_states.dtype)


class OnePlusLayerNorm(BiasedNorm):
    """Nemotron's."""

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, (HIDDEN_SIZE,), self.weight + 1, self.bias, self.eps)


class BetaFirstNorm(nn.Module):
    """Names that do not say which is the bias, which comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.zeros(HIDDEN_SIZE))
        self.gamma = nn.Parameter(torch.ones(HIDDEN_SIZE))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (HIDDEN_SIZE,), self.gamma, self.beta, self.eps)


class BiasFirstNorm(nn.Module):
    """The bias is defined first."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(HIDDEN_SIZE))
        self.a = nn.Parameter(torch.ones(HIDDEN_SIZE))
        self.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (HIDDEN_SIZE,), self.a, self.bias, self.eps)


class FixedShapeNorm(nn.Module):
    """OLMo's: no weight, but rows of one width."""

    def __init__(self) -> None:
        super().__init__()
        self.normalized_shape = (HIDDEN_SIZE,)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.normalized_shape, None, None, eps=1e-5).to(x.dtype)


class BufferedNorm(WeightedNorm):
    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return x * rstd(x, self.eps) * self.weight * self.scale


NORMS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama": (LlamaForm, LLAMA),
    "power": (PowerNorm, LLAMA),
    "gemma": (GemmaForm, OFFSET),
    "olmo2": (Olmo2Form, GEMMA),
    "no_casts": (DividingNorm, LLAMA),
    "no_casts_one_plus": (PlainOnePlusNorm, "rms_norm (llama casting, offset 1)"),
    "functional": (FunctionalNorm, None),
    "weightless": (Weightless, LLAMA),
    "eps_in_code": (EpsInCodeNorm, LLAMA),
    "eps_of_class": (EpsOfClassNorm, LLAMA),
    "two_small_floats": (TwoFloatsNorm, LLAMA),
    "buffer_of_no_checkpoint": (lambda: BufferedNorm(persistent=False), LLAMA),
    "torch_rms": (lambda: nn.RMSNorm(HIDDEN_SIZE, eps=1e-5), None),
    "torch_rms_default_eps": (lambda: nn.RMSNorm(HIDDEN_SIZE), None),
    "torch_rms_weightless": (lambda: nn.RMSNorm(HIDDEN_SIZE, elementwise_affine=False), LLAMA),
    "cohere": (CohereForm, "layer_norm"),
    "one_plus_layer_norm": (OnePlusLayerNorm, "layer_norm (offset 1)"),
    "beta_first": (BetaFirstNorm, "layer_norm"),
    "bias_first": (BiasFirstNorm, "layer_norm"),
    "fixed_shape": (FixedShapeNorm, "layer_norm"),
    "torch_layer_norm": (lambda: nn.LayerNorm(HIDDEN_SIZE), "layer_norm"),
    "torch_layer_norm_large_eps": (lambda: nn.LayerNorm(HIDDEN_SIZE, eps=0.5), "layer_norm"),
    "torch_layer_norm_no_bias": (lambda: nn.LayerNorm(HIDDEN_SIZE, bias=False), "layer_norm"),
    "torch_layer_norm_weightless": (lambda: nn.LayerNorm(HIDDEN_SIZE, elementwise_affine=False), "layer_norm"),
}
# PyTorch's own function rounds like Gemma's; with float32 weights for bfloat16 rows releases differ.
NORMS = {name: (make, expected or GEMMA) for name, (make, expected) in NORMS.items()}


def rows(*shape: int) -> Tensor:
    """Rows of different sizes, in which eps matters or not, and with different means."""
    x = torch.randn(*shape, HIDDEN_SIZE)
    return x * torch.logspace(-3, 1, shape[-1])[:, None] + torch.linspace(0, 0.1, shape[-1])[:, None]


@pytest.mark.parametrize("shape", [(7,), (2, 7), (2, 3, 7)], ids=["2d", "3d", "4d"])
@pytest.mark.parametrize(("make", "description"), NORMS.values(), ids=NORMS)
def test_norm_of_any_form_is_replaced_and_stays_the_same(
    make: Callable[[], nn.Module], description: str, shape: tuple[int, ...]
) -> None:
    norm = fill(make())
    assert_same(norm, assert_replaced(norm, description), rows(*shape))


@pytest.mark.parametrize(("make", "description"), NORMS.values(), ids=NORMS)
def test_norm_of_any_form_in_bfloat16_is_replaced_and_stays_the_same(
    make: Callable[[], nn.Module], description: str
) -> None:
    norm = fill(make()).bfloat16()
    assert_same(norm, assert_replaced(norm, description), rows(2, 7).bfloat16())


@pytest.mark.parametrize("make", [LlamaForm, GemmaForm, Olmo2Form, Weightless, CohereForm])
def test_output_for_bfloat16_rows_and_float32_weights_has_the_dtype_of_the_original(
    make: Callable[[], nn.Module],
) -> None:
    norm = fill(make())
    twin, _ = patched_twin(norm)
    x = rows(2, 7).bfloat16()
    assert twin(x).dtype == norm(x).dtype
    torch.testing.assert_close(twin(x), norm(x), rtol=torch.finfo(torch.bfloat16).eps, atol=0)


@pytest.mark.parametrize(
    ("make", "name"), [(LlamaForm, "hidden_states"), (PowerNorm, "inputs"), (OnePlusLayerNorm, "input")]
)
def test_norm_takes_its_input_by_its_own_name_and_no_other(
    make: Callable[[], nn.Module], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = fill(make())
    twin, _ = patched_twin(norm)
    calls: list[None] = []
    for function in ("rms_norm", "layer_norm"):
        fused = getattr(norms, function)
        monkeypatch.setattr(norms, function, lambda *args, fused=fused, **kw: calls.append(None) or fused(*args, **kw))
    assert_same(norm, twin, **{name: rows(2, 7)})
    assert len(calls) == 1
    with pytest.raises(TypeError, match="another_name"):
        twin(another_name=rows(2, 7))


def test_each_norm_keeps_its_own_eps_also_when_it_changes_later() -> None:
    model = nn.Sequential(*(fill(Olmo2Form(eps)) for eps in (1e-5, 1e-3)))
    originals = [fill(Olmo2Form(1e-5)), fill(Olmo2Form(1e-3))]
    for norm, original in zip(model, originals, strict=True):
        original.load_state_dict(norm.state_dict())
    (entry,) = apply_liger_kernels(model).entries
    assert (entry.replacement, entry.count) == (GEMMA, 2)
    for norm, original in zip(model, originals, strict=True):
        assert_same(original, norm, rows(2, 7))
        original.eps = norm.eps = 0.1
        assert_same(original, norm, rows(2, 7))


class OptionalResidualNorm(WeightedNorm):
    """May add something first, and then returns the sum as well."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        y = total * rstd(total, self.eps) * self.weight
        return y if residual is None else (y, total)


class EpsOutsideRootNorm(WeightedNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class ClampedVarianceNorm(WeightedNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.pow(2).mean(-1, keepdim=True).clamp(min=self.eps).rsqrt() * self.weight


class GroupedNorm(WeightedNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        groups = hidden_states.unflatten(-1, (4, -1))
        return (groups * rstd(groups, self.eps)).flatten(-2) * self.weight


class PerHeadNorm(WeightedNorm):
    """Weights for one head, and rows of any number of them."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        heads = hidden_states.unflatten(-1, (-1, HIDDEN_SIZE))
        return (heads * rstd(heads, self.eps) * self.weight).flatten(-2)


class WeightlessGroupsNorm(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        groups = hidden_states.unflatten(-1, (-1, 32))
        return (groups * rstd(groups, 1e-5)).flatten(-2)


class FactorNorm(WeightedNorm):
    def forward(self, x: Tensor) -> Tensor:
        return rstd(x, self.eps) * self.weight.sum()


class ResidualNorm(WeightedNorm):
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return total * rstd(total, self.eps) * self.weight, total


class TwoOutputsNorm(WeightedNorm):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * rstd(x, self.eps) * self.weight, x


class GatedNorm(WeightedNorm):
    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return hidden_states * rstd(hidden_states, self.eps) * self.weight * F.silu(gate)


class UnbiasedVarianceNorm(BiasedNorm):
    def forward(self, x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return self.weight * centered * torch.rsqrt(x.var(-1, keepdim=True) + self.eps) + self.bias


class L2Norm(WeightedNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps) * self.weight


class ClampedNorm(WeightedNorm):
    def forward(self, x: Tensor) -> Tensor:
        return (x * rstd(x, self.eps) * self.weight).clamp(-2.0, 2.0)


class ScaledNorm(WeightedNorm):
    def __init__(self, scale: float = 1.5) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * rstd(x, self.eps) * self.weight * self.scale


class BiasedRMSNorm(BiasedNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * rstd(x, self.eps) * self.weight + self.bias


class FirstDimensionNorm(WeightedNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.eps) * self.weight


class ScalarGainNorm(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(shape))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * rstd(x, self.eps) * self.gain


NO_VECTORS = "its tensors are not one vector of weights and one of biases"
LOOK_ALIKES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "eps_outside_root": (EpsOutsideRootNorm, "output differs by"),
    "eps_as_minimum": (ClampedVarianceNorm, "output differs by"),
    "grouped": (GroupedNorm, "output differs by"),
    "per_head": (PerHeadNorm, "it takes rows that are wider than its weights"),
    "weightless_groups": (WeightlessGroupsNorm, "rms_norm (llama casting) is not the same: unflatten"),
    "factor_only": (FactorNorm, "output is torch.float32 (1, 5, 24), the original's torch.float32 (1, 5, 1)"),
    "two_inputs": (ResidualNorm, "its forward takes more than one input"),
    "optional_second_input": (OptionalResidualNorm, "its forward takes more than one input"),
    "two_outputs": (TwoOutputsNorm, "1 outputs, the original has 2"),
    "gated": (GatedNorm, "its forward takes more than one input"),
    "unbiased_variance": (UnbiasedVarianceNorm, "output differs by"),
    "l2": (L2Norm, "output differs by"),
    "clamped": (ClampedNorm, "output differs by"),
    "scaled": (ScaledNorm, "output differs by"),
    "rms_with_bias": (BiasedRMSNorm, "layer_norm is not the same: output differs by"),
    "another_dimension": (FirstDimensionNorm, "output differs by"),
    "scalar_gain": (ScalarGainNorm, NO_VECTORS),
    "gain_of_one_element": (lambda: ScalarGainNorm(1), "it takes rows that are wider than its weights"),
    "buffer": (BufferedNorm, NO_VECTORS),
    "batch_norm": (lambda: nn.BatchNorm1d(HIDDEN_SIZE), NO_VECTORS),
    "group_norm": (lambda: nn.GroupNorm(2, HIDDEN_SIZE), "layer_norm is not the same"),
    "two_normalized_dimensions": (lambda: nn.LayerNorm((5, HIDDEN_SIZE)), NO_VECTORS),
}


@pytest.mark.parametrize(("make", "reason"), LOOK_ALIKES.values(), ids=LOOK_ALIKES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_look_alike_is_kept_with_a_reason(make: Callable[[], nn.Module], reason: str, dtype: torch.dtype) -> None:
    assert_kept(fill(make()).to(dtype), reason)


class Scaled(nn.Module):
    """Parameters of a norm, but neither an eps nor its name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN_SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return x * rstd(x, 1e-6) * self.weight


@pytest.mark.parametrize("make", [Scaled, lambda: nn.Linear(8, 8), nn.SiLU, lambda: nn.Embedding(8, 8)])
def test_module_without_eps_and_name_of_a_norm_is_not_reported(make: Callable[[], nn.Module]) -> None:
    assert apply_liger_kernels(make()).entries == []


@pytest.mark.parametrize("name", [name for name in dir(nn) if "Dropout" in name])
def test_dropout_whose_probability_looks_like_an_eps_is_not_reported(name: str) -> None:
    assert apply_liger_kernels(getattr(nn, name)(0.005)).entries == []


def test_instance_that_differs_in_a_number_is_judged_by_itself() -> None:
    model = nn.ModuleList([ScaledNorm(1.0), ScaledNorm(2.0), ScaledNorm(1.0)])
    entries = apply_liger_kernels(model).entries
    assert [(entry.count, entry.replacement) for entry in entries] == [(2, LLAMA), (1, None)]
    assert [isinstance(norm, Patched) for norm in model] == [True, False, True]


def test_instance_that_overrides_forward_is_kept() -> None:
    norms = nn.ModuleList([Olmo2Form(), Olmo2Form()])
    original = norms[1].forward
    norms[1].forward = lambda hidden: original(hidden) + 1.0
    entries = apply_liger_kernels(norms).entries
    assert [(entry.count, entry.reason) for entry in entries] == [
        (1, ""),
        (1, "this instance overrides forward, as accelerate's hooks do"),
    ]
    assert type(norms[1]) is Olmo2Form
