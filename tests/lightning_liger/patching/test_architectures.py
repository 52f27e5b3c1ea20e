"""Every architecture of ``AutoModelForCausalLM``: patched against unpatched, and nothing but the instance changes."""

import copy
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from lightning_liger import apply_liger_kernels
from lightning_liger.patching.rules import Replacement
from tests.lightning_liger.architectures import (
    CAUSAL_LM_TYPES,
    NOT_TRAINED_BY_ALL_VERSIONS,
    UNBUILDABLE,
    VOCAB_SIZE,
    tiny_causal_lm,
    tiny_inputs,
)
from tests.lightning_liger.tiny import TensorSizes, has_memory

NOT_FUSED: dict[str, str] = {
    "musicgen": "its output embeddings are a list of heads, one for each codebook",
    "musicgen_melody": "its output embeddings are a list of heads, one for each codebook",
}
"""Types whose loss is not fused, and why. That of every other type is."""

IS_OLDEST = Version(transformers.__version__) < Version("5.18")
"""Whether this is the oldest version of transformers that is allowed, which has fewer types."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads cost more than they gain on tensors of this size."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def stock_model(model_type: str) -> PreTrainedModel:
    """The model, if the installed version of transformers can train it."""
    if model_type in NOT_TRAINED_BY_ALL_VERSIONS:
        try:
            train(tiny_causal_lm(model_type))
        except Exception as error:
            pytest.skip(f"the stock model does not train: {type(error).__name__}: {error}")
    return tiny_causal_lm(model_type)


def loss_of(model: PreTrainedModel, **kwargs: Any) -> Tensor:
    """The model's own loss, or that of its shifted logits if it has none."""
    inputs = tiny_inputs(model)
    torch.manual_seed(0)  # for forwards that draw numbers
    output = model(**inputs, **kwargs)
    if "labels" in inputs:
        return output.loss
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten())


def logits_of(model: PreTrainedModel) -> Tensor:
    inputs = tiny_inputs(model)
    inputs.pop("labels", None)
    torch.manual_seed(0)
    return model(**inputs).logits


def train(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss, and every parameter's gradient of a fraction of it, as gradient accumulation takes them."""
    model.zero_grad()
    loss = loss_of(model)
    (loss * 0.7).backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def is_fused(patched: PreTrainedModel) -> bool:
    """Whether the one loss that ``patched`` has computed took no whole logits."""
    counters = getattr(patched.get_output_embeddings(), "fusion_counters", None)
    return counters is not None and (counters.num_losses, counters.num_materialized) == (1, 0)


def nudged(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of ``model`` whose weights differ by about their rounding."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-7 * torch.randn(parameter.shape, generator=generator))
    return model


def assert_same_training(
    model: PreTrainedModel, got_loss: Tensor, actual: dict[str, Tensor | None], want_loss: Tensor, expected: Any
) -> None:
    """The same loss, and the same gradients of the same parameters, as those of ``model``.

    A gradient may differ by more than 1e-4 of its largest element if the unpatched model's is as sensitive to rounding:
    that of a bias of keys, for one, is nothing but rounding errors.
    """
    torch.testing.assert_close(got_loss, want_loss, rtol=1e-5, atol=0)
    sensitive: dict[str, Tensor | None] = {}
    for name, want in expected.items():
        got = actual[name]
        assert (got is None) == (want is None), f"{name}: one of the two has no gradient"
        if want is None:
            continue
        error, scale = (got - want).abs().max().item(), want.abs().max().item()
        if not error <= 1e-4 * scale:
            sensitive = sensitive or train(nudged(model))[1]
            allowed = 10 * (sensitive[name] - want).abs().max().item()
            assert error <= allowed, f"{name}: gradients of at most {scale:.1e} differ by {error:.1e}"


@contextmanager
def nothing_else_changes(model: PreTrainedModel, patched: PreTrainedModel) -> Iterator[None]:
    """Patching and running ``patched``, a copy of ``model``, in the block changes no other object."""
    classes = [type(module) for module in model.modules()]
    namespaces = [vars(F), *(vars(sys.modules[each.__module__]) for each in classes), *map(vars, classes)]
    before = [dict(namespace) for namespace in namespaces]
    keys, parameters = list(patched.state_dict()), list(patched.parameters())
    yield
    assert [type(module) for module in model.modules()] == classes
    for namespace, kept in zip(namespaces, before, strict=True):
        assert {name for name in namespace.keys() | kept.keys() if namespace.get(name) is not kept.get(name)} == set()
    assert list(patched.state_dict()) == keys
    assert all(now is then for now, then in zip(patched.parameters(), parameters, strict=True))


class LogitsSizes(TensorSizes):
    """Keeps the size of the largest tensor with a dimension of the vocabulary that is made from the head's call on.

    Those of a parameter's shape are left out: gradients of embeddings and heads are that large, whatever the loss does.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, vocab_size: int) -> None:
        super().__init__(monkeypatch)
        self.vocab_size = vocab_size
        self.logits_size = 0
        head = model.get_output_embeddings()
        head.register_forward_pre_hook(self._before_head)
        shapes = [(vocab_size, head.in_features), *(parameter.shape for parameter in model.parameters())]
        self.parameter_shapes = {tuple(sorted(shape)) for shape in shapes}

    def _before_head(self, head: nn.Linear, args: tuple[Tensor]) -> None:
        self.logits_size = args[0].numel() // head.in_features * self.vocab_size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result) if self.logits_size else []:
            is_real = isinstance(leaf, Tensor) and has_memory(leaf)
            if is_real and tuple(sorted(leaf.shape)) not in self.parameter_shapes:
                self.largest = max(self.largest, leaf.numel() if leaf.numel() % self.vocab_size == 0 else 0)
        return result


def assert_same(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains a model and its patched copy, and compares all that somebody could see."""
    model = stock_model(model_type)
    patched = copy.deepcopy(model)
    with torch.no_grad():
        want = logits_of(model.eval())
    wanted = train(model.train())  # what its modules set up once is set up now
    classes = [type(module) for module in patched.modules()]
    with nothing_else_changes(model, patched):
        report = apply_liger_kernels(patched)
        if model_type in NOT_FUSED:
            trained = train(patched)
        else:
            with LogitsSizes(monkeypatch, patched, want.shape[-1]) as sizes:
                trained = train(patched)
            assert 0 < sizes.largest < 0.75 * sizes.logits_size  # the loss takes chunks of half of the tokens
    assert_same_training(model, *trained, *wanted)
    assert is_fused(patched) == (model_type not in NOT_FUSED)

    model.eval(), patched.eval()
    takes_any = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(model.forward).parameters.values())
    with torch.no_grad():
        got = logits_of(patched)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * want.abs().max().item())
        for kwargs in [{}, {"num_items_in_batch": torch.tensor(40)}] if takes_any else [{}]:
            torch.testing.assert_close(loss_of(patched, **kwargs), loss_of(model, **kwargs), rtol=1e-5, atol=0)
    report.undo()
    assert [type(module) for module in patched.modules()] == classes


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(model_type, marks=pytest.mark.skip(reason=UNBUILDABLE[model_type]))
        if model_type in UNBUILDABLE
        else model_type
        for model_type in CAUSAL_LM_TYPES
    ],
)
def test_patched_model_is_the_same_but_for_its_logits(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(model_type, monkeypatch)


def test_sizes_of_logits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_causal_lm("llama")
    with LogitsSizes(monkeypatch, model, VOCAB_SIZE) as sizes:
        train(model)
    assert sizes.largest >= sizes.logits_size > 0


def test_nearly_every_architecture_is_covered() -> None:
    assert NOT_FUSED.keys() | UNBUILDABLE.keys() <= set(CAUSAL_LM_TYPES)
    at_least = 170 if IS_OLDEST else 180
    assert len(CAUSAL_LM_TYPES) - len(NOT_FUSED) - len(UNBUILDABLE) >= at_least


@pytest.mark.parametrize("model_type", UNBUILDABLE)
def test_architecture_that_is_left_out_cannot_be_built(model_type: str) -> None:
    if model_type == "gemma3n" and importlib.util.find_spec("timm") is not None:
        pytest.skip("timm is installed")
    if model_type == "gemma4_assistant" and IS_OLDEST:
        pytest.skip("this version builds it")
    with pytest.raises((ImportError, ValueError), match=r"timm|layer types"):
        tiny_causal_lm(model_type)


MISTAKES: dict[str, Callable[[Any], Any]] = {
    "output": lambda output: output * 1.001,
    "gradient": lambda output: output.detach() + (output - output.detach()) * 1.01,
    "no_gradient": lambda output: output.detach(),
}


@pytest.mark.parametrize(
    ("model_type", "kernel", "mistake"),
    [
        *((*broken, mistake) for broken in [("llama", "rms_norm"), ("llama", "silu_mul")] for mistake in MISTAKES),
        ("llama", "rope", "output"),
        ("llama", "linear_cross_entropy", "output"),
        ("gpt2", "layer_norm", "gradient"),
        ("mixtral", "silu_mul", "gradient"),
    ],
)
def test_comparison_notices_a_replacement_that_computes_something_else(
    model_type: str, kernel: str, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, change = Replacement.patched_class, MISTAKES[mistake]

    def wrong(self: Replacement, original: type[nn.Module]) -> type[nn.Module]:
        patched = right(self, original)

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            output = patched.forward(self, *args, **kwargs)
            return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

        return type(patched.__name__, (patched,), {"forward": forward}) if self.kernel == kernel else patched

    monkeypatch.setattr(Replacement, "patched_class", wrong)
    for replacement in Replacement.__subclasses__():
        monkeypatch.setattr(replacement, "verify", lambda self, module: 0.0)
    with pytest.raises(AssertionError, match=r"gradient|not close"):
        assert_same(model_type, monkeypatch)


def test_comparison_notices_a_replacement_that_changes_more_than_the_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    modeling_llama, right = sys.modules[type(tiny_causal_lm("llama")).__module__], Replacement.patched_class
    rotate_half = modeling_llama.rotate_half

    def wrong(self: Replacement, original: type[nn.Module]) -> type[nn.Module]:
        monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: rotate_half(x))
        return right(self, original)

    monkeypatch.setattr(Replacement, "patched_class", wrong)
    with pytest.raises(AssertionError, match="rotate_half"):
        assert_same("llama", monkeypatch)
