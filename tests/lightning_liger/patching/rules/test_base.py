"""What every replacement has in common: the class it makes, copies, pickles, and calls that are the original's."""

import copy
import inspect
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_liger import apply_liger_kernels
from lightning_liger.patching.rules import Patched
from lightning_liger.patching.rules.base import Randoms, settings_of, takes_one_tensor
from lightning_liger.patching.rules.gated_mlp import MLPReplacement
from lightning_liger.patching.rules.norm import RMSNormReplacement
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


DUPLICATES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    **{
        f"pickle_{protocol}": lambda module, protocol=protocol: pickle.loads(pickle.dumps(module, protocol))
        for protocol in (0, 2, pickle.HIGHEST_PROTOCOL)
    },
}


@every_kind
@pytest.mark.parametrize("duplicate", DUPLICATES.values(), ids=DUPLICATES)
def test_duplicate_of_a_patched_module_is_patched_and_computes_the_same(
    kind: type[nn.Module], duplicate: Callable[[nn.Module], nn.Module]
) -> None:
    module = fill(kind())
    patched, entry = patched_twin(module)
    assert entry.replacement is not None
    twin = duplicate(patched)
    assert type(twin) is type(patched)
    assert twin is not patched
    assert_same(module, twin, *arguments(kind))
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in twin.state_dict().items())


@every_kind
def test_patched_module_is_saved_and_loaded_by_torch(kind: type[nn.Module], tmp_path) -> None:
    module = fill(kind())
    patched, _ = patched_twin(module)
    torch.save(patched, tmp_path / "module.pt")
    assert_same(module, torch.load(tmp_path / "module.pt", weights_only=False), *arguments(kind))


@every_kind
def test_state_dict_and_parameters_stay_the_same(kind: type[nn.Module]) -> None:
    module = fill(kind())
    parameters, values = dict(module.named_parameters()), {k: v.clone() for k, v in module.state_dict().items()}
    assert apply_liger_kernels(module).num_replaced == 1
    assert list(module.state_dict()) == list(values)
    assert all(torch.equal(value, values[name]) for name, value in module.state_dict().items())
    assert all(parameter is parameters[name] for name, parameter in module.named_parameters())
    stock = kind()
    stock.load_state_dict(module.state_dict())
    assert_same(stock, module, *arguments(kind))


@every_kind
def test_class_of_a_patched_module_is_a_subclass_that_says_what_it_was(kind: type[nn.Module]) -> None:
    module = kind()
    forward = kind.forward
    report = apply_liger_kernels(module)
    patched_class = type(module)
    assert patched_class is not kind
    assert patched_class.__mro__[1:3] == (Patched, kind)
    assert (patched_class.__name__, patched_class.__module__) == (f"Liger{kind.__name__}", kind.__module__)
    assert (patched_class.__doc__, patched_class.liger_original) == (kind.__doc__, kind)
    assert module.liger_replacement.description == report.entries[0].replacement
    assert (patched_class.forward.__name__, patched_class.forward.__doc__) == ("forward", forward.__doc__)
    assert kind.forward is forward is not patched_class.forward


@every_kind
def test_signature_of_forward_stays_the_same(kind: type[nn.Module]) -> None:
    module = kind()
    signature, of_class = inspect.signature(module.forward), inspect.signature(kind.forward)
    assert apply_liger_kernels(module).num_replaced == 1
    assert inspect.signature(module.forward) == signature
    assert inspect.signature(type(module).forward) == of_class


@every_kind
def test_undo_gives_the_class_back(kind: type[nn.Module]) -> None:
    module = kind()
    report = apply_liger_kernels(module)
    assert type(module) is not kind
    report.undo()
    assert type(module) is kind
    report.undo()
    assert type(module) is kind


@every_kind
def test_modules_with_the_same_replacement_share_a_class(kind: type[nn.Module]) -> None:
    first, second = kind(), kind()
    apply_liger_kernels(first)
    apply_liger_kernels(second)
    assert type(first) is type(second) is not kind


def test_equal_replacements_make_one_class_and_others_another() -> None:
    replacement = RMSNormReplacement("eps", "gain", None, 0.0, "llama")
    assert replacement.patched_class(Norm) is RMSNormReplacement("eps", "gain", None, 0.0, "llama").patched_class(Norm)
    assert replacement.patched_class(Norm) is not replacement.patched_class(nn.RMSNorm)
    assert replacement.patched_class(Norm) is not RMSNormReplacement("eps", "gain", None, 0.0, "gemma").patched_class(
        Norm
    )
    assert MLPReplacement("a", "b", "c", "silu_mul") != MLPReplacement("b", "a", "c", "silu_mul")


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


def test_hooks_on_a_patched_module_run() -> None:
    module = fill(Norm())
    twin, _ = patched_twin(module)
    (x,) = arguments(Norm)
    for each in (module, twin):
        each.register_forward_pre_hook(lambda module, args: (args[0] * 2 + 1,))
        each.register_forward_hook(lambda module, args, output: output + 1)
    assert_same(module, twin, x)


def test_trying_leaves_the_module_as_it_was() -> None:
    module = nn.ModuleDict({"norm": fill(Norm()), "mlp": fill(MLP()), "attention": fill(Attention())}).eval()
    attributes = {name: dict(vars(each)) for name, each in module.items()}
    values = {name: value.clone() for name, value in module.state_dict().items()}
    assert apply_liger_kernels(module).num_replaced == 3
    for name, each in module.items():
        assert vars(each) == attributes[name]
        assert not each.training
    assert all(torch.equal(value, values[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


class OneTensor(nn.Module):
    def forward(self, x): ...


class Optional(nn.Module):
    def forward(self, x, mask=None, *args, scale=1.0, **kwargs): ...


class NeedsTwo(nn.Module):
    def forward(self, x, y): ...


class NeedsKeyword(nn.Module):
    def forward(self, x, *, y): ...


class Nothing(nn.Module):
    def forward(self): ...


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(OneTensor, True), (Optional, True), (NeedsTwo, False), (NeedsKeyword, False), (Nothing, False)],
)
def test_takes_one_tensor(kind: type[nn.Module], expected: bool) -> None:
    assert takes_one_tensor(kind()) == expected


def test_settings_are_the_numbers_strings_and_functions_of_an_instance() -> None:
    first, second = Norm(), Norm()
    assert settings_of(first) == settings_of(second)
    for name, value in {"eps": 2e-5, "kind": "one", "activation": F.silu, "scale": 2}.items():
        setattr(first, name, value)
        assert settings_of(first) != settings_of(second)
        setattr(second, name, value)
        assert settings_of(first) == settings_of(second)


def test_randoms_are_the_same_at_every_run_and_require_a_gradient() -> None:
    draws = [[random(3, 2), random(3, 2, dtype=torch.bfloat16, scale=100.0)] for random in map(Randoms, ["cpu"] * 2)]
    assert all(torch.equal(*pair) for pair in zip(*draws, strict=True))
    small, large = draws[0]
    assert (small.dtype, large.dtype) == (torch.float32, torch.bfloat16)
    assert small.is_leaf
    assert large.is_leaf
    assert small.requires_grad
    assert large.requires_grad
    assert not torch.equal(small.bfloat16(), large)
    assert large.abs().mean() > 10 * small.abs().mean()
