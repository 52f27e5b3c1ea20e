"""What every replacement has in common: the class it makes, copies, pickles, and calls that are the original's."""

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_liger import apply_liger_kernels
from lightning_liger.patching.rules.base import Patched
from tests.lightning_liger.patching.rules.comparing import assert_same, fill, patched_twin

SIZE = 16


class Norm(nn.Module):
    """A norm of the tests' own."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(SIZE))
        self.eps = eps

    def forward(self, rows: Tensor) -> Tensor:
        """Normalizes."""
        return self.gain * (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.eps))


class MLP(nn.Module):
    """An MLP with an optional argument."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(SIZE, 24), nn.Linear(SIZE, 24), nn.Linear(24, SIZE)
        self.activation = F.silu

    def forward(self, x: Tensor, scale: float = 1.0, **others: float) -> Tensor:
        """Projects."""
        return self.w2(self.activation(self.w1(x)) * self.w3(x)) * scale + sum(others.values())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


class Attention(nn.Module):
    """No more of an attention than its rotation."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(SIZE))

    def forward(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates."""
        return rotate(q, cos, sin) * self.scale


KINDS: dict[type[nn.Module], tuple[int, ...]] = {Norm: (2, 7, SIZE), MLP: (2, 7, SIZE), Attention: (2, 3, 7, SIZE)}
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def arguments(kind: type[nn.Module]) -> list[Tensor]:
    tables = [torch.randn(2, 7, SIZE), torch.randn(2, 7, SIZE)] if kind is Attention else []
    return [torch.randn(KINDS[kind]), *tables]


@every_kind
def test_class_of_a_patched_module_is_a_subclass_that_says_what_it_was(kind: type[nn.Module]) -> None:
    module, other = kind(), kind()
    forward, signature = kind.forward, inspect.signature(module.forward)
    report = apply_liger_kernels(module)
    apply_liger_kernels(other)
    patched_class: Any = type(module)
    assert patched_class is type(other) is not kind
    assert patched_class.__mro__[1:3] == (Patched, kind)
    assert (patched_class.__name__, patched_class.__module__) == (f"Liger{kind.__name__}", kind.__module__)
    assert (patched_class.__doc__, patched_class.liger_original) == (kind.__doc__, kind)
    assert patched_class.liger_replacement.description == report.entries[0].replacement
    assert (patched_class.forward.__name__, patched_class.forward.__doc__) == ("forward", forward.__doc__)
    assert inspect.signature(module.forward) == signature
    assert kind.forward is forward is not patched_class.forward
    for _ in range(2):
        report.undo()
        assert type(module) is kind


def test_calls_with_more_arguments_than_the_input_are_the_originals() -> None:
    module = fill(MLP())
    twin, entry = patched_twin(module)
    assert entry.replacement == "silu_mul"
    (x,) = arguments(MLP)
    assert_same(module, twin, x, 3.0)
    assert_same(module, twin, x, scale=3.0)
    assert_same(module, twin, x=x, scale=3.0, other=1.0)
    assert not torch.allclose(twin(x, 3.0), twin(x))
    for each in (module, twin):
        with pytest.raises(TypeError, match="'x'"):
            each(scale=x)
        with pytest.raises(TypeError):
            each(x, 1.0, 2.0)


def test_trying_leaves_the_module_as_it_was() -> None:
    module = nn.ModuleDict({"norm": fill(Norm()), "mlp": fill(MLP()), "attention": fill(Attention())}).eval()
    attributes = {name: dict(vars(each)) for name, each in module.items()}
    values = {name: value.clone() for name, value in module.state_dict().items()}
    random_state = torch.get_rng_state()
    assert apply_liger_kernels(module).num_replaced == 3
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, each in module.items():
        assert vars(each) == attributes[name]
        assert not each.training
    assert all(torch.equal(value, values[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
