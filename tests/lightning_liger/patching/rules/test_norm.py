"""Norms are found whatever they are called and however they are written; what resembles them is left alone."""

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_liger import apply_liger_kernels
from lightning_liger.patching.rules.base import Patched
from tests.lightning_liger.patching.rules.comparing import (
    assert_kept,
    assert_replaced,
    assert_same,
    fill,
    patched_twin,
    written,
)

SIZE = 24
GEMMA = "rms_norm (gemma casting)"


def rstd(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def llama(m: nn.Module, x: Tensor) -> Tensor:
    return m.weight * (x.float() * rstd(x.float(), m.eps)).to(x.dtype)


def gemma(m: nn.Module, x: Tensor) -> Tensor:
    return (m.weight * (x.float() * rstd(x.float(), m.eps))).to(x.dtype)


def plain(m: nn.Module, x: Tensor) -> Tensor:
    return x * rstd(x, m.eps) * m.weight


def with_buffer(module: nn.Module, persistent: bool) -> nn.Module:
    module.register_buffer("buffer", torch.ones(1), persistent=persistent)
    return module


def random_norm(rng: random.Random) -> tuple[nn.Module, str]:
    """A norm as somebody may have written it, and what the report says of it."""
    casting = rng.choice(["llama", "gemma", "layer"])
    weight, bias = rng.sample(["weight", "gain", "a", "z"], 2)
    eps = rng.choice([1e-5, 1e-6, 1e-3])
    eps_name = rng.choice(["eps", "variance_epsilon", "tiny", *[None] * (eps < 1e-4)])
    is_weightless, offset = rng.random() < 0.2, rng.choice([0.0, 0.0, 1.0])
    has_bias = casting == "layer" and not is_weightless and rng.random() < 0.5

    def forward(m: Any, x: Tensor) -> Tensor:
        wide, tiny = x.float(), eps if eps_name is None else getattr(m, eps_name)
        wide = wide - wide.mean(-1, keepdim=True) if casting == "layer" else wide
        y = wide * rstd(wide, tiny)
        if not is_weightless:
            scale = getattr(m, weight)
            y = y.to(x.dtype) * (scale + offset) if casting == "llama" else y * (scale.float() + offset)
            y = y + getattr(m, bias).float() if has_bias else y
        return y if casting == "llama" and not is_weightless else y.to(x.dtype)

    shapes = {} if is_weightless else {weight: SIZE, **({bias: SIZE} if has_bias else {})}
    names = rng.sample(list(shapes), len(shapes))  # in any order
    module = written(forward, "SomeNorm", **{name: shapes[name] for name in names})
    if eps_name is not None:
        module.init_std = 2e-3
        setattr(module, eps_name, eps)
    if rng.random() < 0.2:
        with_buffer(module, persistent=False)
    details = [] if casting == "layer" else [f"{'llama' if is_weightless else casting} casting"]
    details += ["offset 1"] if offset and not is_weightless else []
    kernel = "layer_norm" if casting == "layer" else "rms_norm"
    return module, kernel + (f" ({', '.join(details)})" if details else "")


NORMS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "without casts": (lambda: written(plain, weight=SIZE, eps=1e-5), "rms_norm (llama casting)"),
    "functional": (lambda: written(lambda m, x: F.rms_norm(x, (SIZE,), m.weight, m.eps), weight=SIZE, eps=1e-5), GEMMA),
    "torch RMSNorm": (lambda: nn.RMSNorm(SIZE, eps=1e-5), GEMMA),
    "default eps": (lambda: nn.RMSNorm(SIZE), GEMMA),
    "torch RMSNorm, no weight": (lambda: nn.RMSNorm(SIZE, elementwise_affine=False), "rms_norm (llama casting)"),
    "large eps": (lambda: nn.LayerNorm(SIZE, eps=0.5), "layer_norm"),
    "torch LayerNorm, no bias": (lambda: nn.LayerNorm(SIZE, bias=False), "layer_norm"),
    "torch LayerNorm, no weight": (lambda: nn.LayerNorm(SIZE, elementwise_affine=False), "layer_norm"),
}


def rows(*shape: int) -> Tensor:
    """Rows of different sizes, in which eps matters or not, and with different means."""
    x = torch.randn(*shape, SIZE)
    return x * torch.logspace(-3, 1, shape[-1])[:, None] + torch.linspace(0, 0.1, shape[-1])[:, None]


def assert_replaced_and_same(module: nn.Module, description: str, dtype: torch.dtype) -> None:
    norm = fill(module).to(dtype)
    twin = assert_replaced(norm, description)
    for shape in ((7,), (2, 7), (2, 3, 7)):
        assert_same(norm, twin, rows(*shape).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("part", range(3))
def test_norm_of_any_form_is_replaced_and_stays_the_same(part: int, dtype: torch.dtype) -> None:
    for seed in range(15 * part, 15 * part + 15):
        assert_replaced_and_same(*random_norm(random.Random(seed)), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("make", "description"), NORMS.values(), ids=NORMS)
def test_norms_of_torch_are_replaced(make: Callable[[], nn.Module], description: str, dtype: torch.dtype) -> None:
    assert_replaced_and_same(make(), description, dtype)


@pytest.mark.parametrize("forward", [llama, gemma], ids=["llama", "gemma"])
def test_output_for_bfloat16_rows_and_float32_weights_has_the_dtype_of_the_original(forward: Any) -> None:
    norm = fill(written(forward, weight=SIZE, eps=1e-5))
    twin, _ = patched_twin(norm)
    x = rows(2, 7).bfloat16()
    assert twin(x).dtype == norm(x).dtype
    torch.testing.assert_close(twin(x), norm(x), rtol=torch.finfo(torch.bfloat16).eps, atol=0)


def random_gated_norm(rng: random.Random) -> tuple[nn.Module, str]:
    """A norm with a gate as somebody may have written it, and what the report says of it."""
    casting, before = rng.choice(["llama", "gemma"]), rng.random() < 0.5
    activation = rng.choice(["silu", "sigmoid"]) if before else "silu"
    groups, names_size = rng.choice([1, 2, 3]), rng.random() < 0.5

    def forward(m: Any, x: Tensor, gate: Tensor | None = None) -> Tensor:
        factor = 1.0 if gate is None else getattr(torch, activation, F.silu)(gate.float())
        z = (x.float() * (1.0 if before else factor)).unflatten(-1, (m.n if not names_size else SIZE // m.n, -1))
        y = (z * rstd(z, m.eps)).flatten(-2)
        y = m.weight * y.to(x.dtype) if casting == "llama" else (m.weight.float() * y)
        y = y * factor if before else y
        return y.to(torch.promote_types(x.dtype, m.weight.dtype) if casting == "llama" else x.dtype)

    module = written(forward, "Gated", weight=SIZE)  # type: ignore[arg-type]
    module.eps, module.n = rng.choice([1e-5, 1e-6]), SIZE // groups if names_size else groups
    details = [f"{casting} casting"] + ["norm before gate"] * before + [activation] * (activation != "silu")
    return module, f"gated_rms_norm ({', '.join(details + [f'groups of {SIZE // groups}'] * (groups > 1))})"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gated_norm_of_any_form_is_replaced_and_stays_the_same(dtype: torch.dtype) -> None:
    for seed in range(20):
        module, description = random_gated_norm(random.Random(seed))
        norm = fill(module).to(dtype)
        twin = assert_replaced(norm, description)
        for shape in ((7,), (2, 7)):
            x, gate = rows(*shape).to(dtype), rows(*shape).to(dtype)
            assert_same(norm, twin, x, gate)
            assert_same(norm, twin, x, gate=gate)
            assert_same(norm, twin, x)


class Norm(nn.Module):
    """May be scaled."""

    def __init__(self, eps: float = 1e-5, factor: float = 1.0) -> None:
        super().__init__()
        self.weight, self.eps, self.factor = nn.Parameter(torch.ones(SIZE)), eps, factor

    def forward(self, x: Tensor) -> Tensor:
        return gemma(self, x) * self.factor


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
WIDER, DIFFERS = "it takes rows that are wider than its weights", "output differs by"
BIASED = {"weight": SIZE, "bias": SIZE}
FORWARDS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "eps outside root": (
        lambda m, x: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + m.eps) * m.weight, DIFFERS, {},
    ),
    "grouped": (lambda m, x: groups(m, x) * m.weight, DIFFERS, {}),
    "per head": (per_head, WIDER, {}),
    "factor only": (lambda m, x: rstd(x, m.eps) * m.weight.sum(), "output is torch.float32 (1, 5, 24), the orig", {}),
    "two inputs": (lambda m, x, residual: plain(m, x + residual), DIFFERS, {}),
    "three inputs": (lambda m, x, gate, up: plain(m, x * gate * up), MORE_INPUTS, {}),
    "gelu gate": (lambda m, x, gate: plain(m, x * F.gelu(gate)), DIFFERS, {}),
    "detached gate": (lambda m, x, gate: plain(m, x * F.silu(gate.detach())), "have been used in the graph", {}),
    "detached": (lambda m, x: x * rstd(x, m.eps).detach() * m.weight, "gradient differs by", {}),
    "weightless groups": (lambda m, x: groups(m, x, 32), "(llama casting) is not equivalent", {"weight": None}),
    "unbiased variance": (unbiased, DIFFERS, BIASED),
    "rms with bias": (lambda m, x: plain(m, x) + m.bias, "layer_norm is not equivalent: output differs by", BIASED),
    "scalar gain": (plain, NO_VECTORS, {"weight": ()}),
    "gain of one element": (plain, WIDER, {"weight": 1}),
}  # fmt: skip
LOOK_ALIKES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    **{
        name: (partial(written, forward, "SomeNorm", **({"weight": SIZE, "eps": 1e-5} | changes)), reason)
        for name, (forward, reason, changes) in FORWARDS.items()
    },
    "buffer": (lambda: with_buffer(written(plain, "SomeNorm", weight=SIZE, eps=1e-5), persistent=True), NO_VECTORS),
    "batch norm": (lambda: nn.BatchNorm1d(SIZE), NO_VECTORS),
    "group norm": (lambda: nn.GroupNorm(2, SIZE), "layer_norm is not equivalent"),
    "two normalized dimensions": (lambda: nn.LayerNorm((5, SIZE)), NO_VECTORS),
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


def test_instances_with_other_values_in_a_buffer_are_judged_by_themselves() -> None:
    norm = written(lambda m, x: plain(m, x) * m.buffer, "SomeNorm", weight=SIZE, eps=1e-5)
    model = nn.ModuleList([with_buffer(norm, persistent=False), copy.deepcopy(norm)])
    model[1].buffer.fill_(2.0)
    apply_liger_kernels(model)
    assert [isinstance(norm, Patched) for norm in model] == [True, False]
