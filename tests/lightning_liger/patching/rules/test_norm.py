"""Norms are found whatever they are called and however they are written; what resembles them is left alone."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_liger import apply_liger_kernels
from lightning_liger.patching.rules import Patched
from tests.lightning_liger.patching.rules.comparing import (
    assert_kept,
    assert_replaced,
    assert_same,
    fill,
    patched_twin,
    written,
)

SIZE = 24
LLAMA, GEMMA, OFFSET = "rms_norm (llama casting)", "rms_norm (gemma casting)", "rms_norm (gemma casting, offset 1)"


def rstd(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def llama(m: nn.Module, x: Tensor) -> Tensor:
    return m.gain * (x.float() * rstd(x.float(), m.variance_epsilon)).to(x.dtype)


def gemma(m: nn.Module, x: Tensor) -> Tensor:
    return (x.float() * rstd(x.float(), m.epsilon) * (1.0 + m.scale.float())).type_as(x)


def olmo2(m: nn.Module, x: Tensor) -> Tensor:
    return (m.weight * (x.float() * rstd(x.float(), m.eps))).to(x.dtype)


def plain(m: nn.Module, x: Tensor) -> Tensor:
    return x * rstd(x, m.eps) * m.weight


def weightless(m: nn.Module, x: Tensor) -> Tensor:
    return (x.float() * rstd(x.float(), m.e)).type_as(x)


def cohere(m: nn.Module, x: Tensor) -> Tensor:
    centered = x.float() - x.float().mean(-1, keepdim=True)
    return (m.weight.float() * (centered * rstd(centered, m.eps))).to(x.dtype)


def buffered(persistent: bool) -> nn.Module:
    module = written(lambda m, x: plain(m, x) * m.scale, "BufferedNorm", weight=SIZE, eps=1e-5)
    module.register_buffer("scale", torch.ones(1), persistent=persistent)
    return module


WEIGHTED = {"weight": SIZE, "eps": 1e-5}
NORMS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama": (lambda: written(llama, gain=SIZE, variance_epsilon=1e-5), LLAMA),
    "power": (
        lambda: written(
            lambda m, x: m.g * (x.float() * (x.float().square().mean(-1, keepdim=True) + m.tiny).pow(-0.5)).type_as(x),
            g=SIZE,
            tiny=1e-6,
        ),
        LLAMA,
    ),
    "gemma": (lambda: written(gemma, scale=SIZE, epsilon=1e-6), OFFSET),
    "olmo2": (lambda: written(olmo2, **WEIGHTED), GEMMA),
    "no_casts": (lambda: written(plain, **WEIGHTED), LLAMA),
    "no_casts_one_plus": (
        lambda: written(lambda m, x: x * rstd(x, m.eps) * (1 + m.weight), **WEIGHTED),
        "rms_norm (llama casting, offset 1)",
    ),
    # PyTorch's own function rounds like Gemma's.
    "functional": (lambda: written(lambda m, x: F.rms_norm(x, (SIZE,), m.weight, m.eps), **WEIGHTED), GEMMA),
    "weightless": (lambda: written(weightless, e=1e-5), LLAMA),
    "eps_in_code": (
        lambda: written(lambda m, x: m.w * (x.float() * rstd(x.float(), 1e-6)).to(x.dtype), "CodeNorm", w=SIZE),
        LLAMA,
    ),
    "two_small_floats": (lambda: written(plain, weight=SIZE, init_std=2e-3, eps=1e-5), LLAMA),
    "buffer_of_no_checkpoint": (lambda: buffered(persistent=False), LLAMA),
    "torch_rms": (lambda: nn.RMSNorm(SIZE, eps=1e-5), GEMMA),
    "torch_rms_default_eps": (lambda: nn.RMSNorm(SIZE), GEMMA),
    "torch_rms_weightless": (lambda: nn.RMSNorm(SIZE, elementwise_affine=False), LLAMA),
    "cohere": (lambda: written(cohere, **WEIGHTED), "layer_norm"),
    "one_plus_layer_norm": (
        lambda: written(
            lambda m, x: F.layer_norm(x, (SIZE,), m.weight + 1, m.bias, m.eps), weight=SIZE, bias=SIZE, eps=1e-5
        ),
        "layer_norm (offset 1)",
    ),
    "beta_first": (
        lambda: written(lambda m, x: F.layer_norm(x, (SIZE,), m.gamma, m.beta, m.eps), beta=SIZE, gamma=SIZE, eps=1e-6),
        "layer_norm",
    ),
    "torch_layer_norm_large_eps": (lambda: nn.LayerNorm(SIZE, eps=0.5), "layer_norm"),
    "torch_layer_norm_no_bias": (lambda: nn.LayerNorm(SIZE, bias=False), "layer_norm"),
    "torch_layer_norm_weightless": (lambda: nn.LayerNorm(SIZE, elementwise_affine=False), "layer_norm"),
}


def rows(*shape: int) -> Tensor:
    """Rows of different sizes, in which eps matters or not, and with different means."""
    x = torch.randn(*shape, SIZE)
    return x * torch.logspace(-3, 1, shape[-1])[:, None] + torch.linspace(0, 0.1, shape[-1])[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("make", "description"), NORMS.values(), ids=NORMS)
def test_norm_of_any_form_is_replaced_and_stays_the_same(
    make: Callable[[], nn.Module], description: str, dtype: torch.dtype
) -> None:
    norm = fill(make()).to(dtype)
    twin = assert_replaced(norm, description)
    for shape in ((7,), (2, 7), (2, 3, 7)):
        assert_same(norm, twin, rows(*shape).to(dtype))


@pytest.mark.parametrize("name", ["llama", "gemma", "olmo2", "weightless", "cohere"])
def test_output_for_bfloat16_rows_and_float32_weights_has_the_dtype_of_the_original(name: str) -> None:
    norm = fill(NORMS[name][0]())
    twin, _ = patched_twin(norm)
    x = rows(2, 7).bfloat16()
    assert twin(x).dtype == norm(x).dtype
    torch.testing.assert_close(twin(x), norm(x), rtol=torch.finfo(torch.bfloat16).eps, atol=0)


def test_norm_without_weight_over_one_width_is_replaced() -> None:
    norm = written(
        lambda m, x: F.layer_norm(x.float(), m.normalized_shape, None, None, eps=1e-5).to(x.dtype), "OLMoNorm"
    )
    norm.normalized_shape = (SIZE,)
    assert_same(norm, assert_replaced(norm, "layer_norm"), rows(2, 7))


class Norm(nn.Module):
    """May be scaled."""

    def __init__(self, eps: float = 1e-5, factor: float = 1.0) -> None:
        super().__init__()
        self.weight, self.eps, self.factor = nn.Parameter(torch.ones(SIZE)), eps, factor

    def forward(self, x: Tensor) -> Tensor:
        return olmo2(self, x) * self.factor


def test_each_norm_keeps_its_own_eps_also_when_it_changes_later() -> None:
    model, originals = (nn.ModuleList([Norm(1e-5), Norm(1e-3)]) for _ in range(2))
    (entry,) = apply_liger_kernels(model).entries
    assert (entry.replacement, entry.count) == (GEMMA, 2)
    for norm, original in zip(model, originals, strict=True):
        assert_same(original, norm, rows(2, 7))
        original.eps = norm.eps = 0.1
        assert_same(original, norm, rows(2, 7))


def per_head(m: nn.Module, x: Tensor) -> Tensor:
    """Weights for one head, and rows of any number of them."""
    heads = x.unflatten(-1, (-1, SIZE))
    return (heads * rstd(heads, m.eps) * m.weight).flatten(-2)


def groups(m: nn.Module, x: Tensor, size: int = 6) -> Tensor:
    parts = x.unflatten(-1, (-1, size))
    return (parts * rstd(parts, 1e-5)).flatten(-2)


def unbiased(m: nn.Module, x: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return m.weight * centered * torch.rsqrt(x.var(-1, keepdim=True) + m.eps) + m.bias


NO_VECTORS = "its tensors are not one vector of weights and one of biases"
MORE_INPUTS = "its forward takes more than one input"
BIASED = {"weight": SIZE, "bias": SIZE, "eps": 1e-5}
LOOK_ALIKES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    **{
        name: (lambda forward=forward: written(forward, "SomeNorm", **WEIGHTED), reason)
        for name, (forward, reason) in {
            "eps_outside_root": (
                lambda m, x: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + m.eps) * m.weight,
                "output differs by",
            ),
            "eps_as_minimum": (
                lambda m, x: x * x.pow(2).mean(-1, keepdim=True).clamp(min=m.eps).rsqrt() * m.weight,
                "output differs by",
            ),
            "grouped": (lambda m, x: groups(m, x) * m.weight, "output differs by"),
            "per_head": (per_head, "it takes rows that are wider than its weights"),
            "factor_only": (
                lambda m, x: rstd(x, m.eps) * m.weight.sum(),
                "output is torch.float32 (1, 5, 24), the original's torch.float32 (1, 5, 1)",
            ),
            "two_inputs": (lambda m, x, residual: plain(m, x + residual), MORE_INPUTS),
            "optional_second_input": (lambda m, x, gate=None: plain(m, x), MORE_INPUTS),
            "two_outputs": (lambda m, x: (plain(m, x), x), "1 outputs, the original has 2"),
            "l2": (
                lambda m, x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + m.eps) * m.weight,
                "output differs by",
            ),
            "clamped": (lambda m, x: plain(m, x).clamp(-2.0, 2.0), "output differs by"),
            "scaled": (lambda m, x: plain(m, x) * 1.5, "output differs by"),
            "detached": (lambda m, x: x * rstd(x, m.eps).detach() * m.weight, "gradient differs by"),
            "another_dimension": (
                lambda m, x: x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + m.eps) * m.weight,
                "output differs by",
            ),
        }.items()
    },
    "weightless_groups": (
        lambda: written(lambda m, x: groups(m, x, 32), "GroupsNorm"),
        "rms_norm (llama casting) is not the same: unflatten",
    ),
    "unbiased_variance": (lambda: written(unbiased, "SomeNorm", **BIASED), "output differs by"),
    "rms_with_bias": (
        lambda: written(lambda m, x: plain(m, x) + m.bias, "SomeNorm", **BIASED),
        "layer_norm is not the same: output differs by",
    ),
    "scalar_gain": (lambda: written(plain, "SomeNorm", weight=(), eps=1e-6), NO_VECTORS),
    "gain_of_one_element": (
        lambda: written(plain, "SomeNorm", weight=1, eps=1e-6),
        "it takes rows that are wider than its weights",
    ),
    "buffer": (lambda: buffered(persistent=True), NO_VECTORS),
    "batch_norm": (lambda: nn.BatchNorm1d(SIZE), NO_VECTORS),
    "group_norm": (lambda: nn.GroupNorm(2, SIZE), "layer_norm is not the same"),
    "two_normalized_dimensions": (lambda: nn.LayerNorm((5, SIZE)), NO_VECTORS),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("make", "reason"), LOOK_ALIKES.values(), ids=LOOK_ALIKES)
def test_look_alike_is_kept_with_a_reason(make: Callable[[], nn.Module], reason: str, dtype: torch.dtype) -> None:
    assert_kept(fill(make()).to(dtype), reason)


def test_module_without_eps_and_name_of_a_norm_is_not_reported() -> None:
    scaled = written(lambda m, x: x * rstd(x, 1e-6) * m.weight, weight=SIZE)
    dropouts = [getattr(nn, name)(0.005) for name in dir(nn) if "Dropout" in name]  # which looks like an eps
    for module in (scaled, nn.Linear(8, 8), nn.SiLU(), nn.Embedding(8, 8), *dropouts):
        assert apply_liger_kernels(module, {"silu_mul": False}).entries == []


def test_instance_that_differs_is_judged_by_itself() -> None:
    model = nn.ModuleList([Norm(), Norm(factor=2.0), Norm(), Norm()])
    original = model[3].forward
    model[3].forward = lambda x: original(x) + 1.0
    entries = {(entry.count, entry.replacement, entry.reason[:28]) for entry in apply_liger_kernels(model).entries}
    different = "rms_norm (llama casting) is "
    assert entries == {(2, GEMMA, ""), (1, None, different), (1, None, "this instance overrides forw")}
    assert [isinstance(norm, Patched) for norm in model] == [True, False, True, False]
