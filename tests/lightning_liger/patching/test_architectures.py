"""Every architecture of ``AutoModelForCausalLM``: patched against unpatched, and nothing but the instance changes.

What is replaced is what ``docs/models.md`` says.
"""

import copy
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedModel

from lightning_liger import apply_liger_kernels
from tests.lightning_liger.architectures import (
    CAUSAL_LM_TYPES,
    NOT_TRAINED_BY_ALL_VERSIONS,
    UNBUILDABLE,
    tiny_causal_lm,
    tiny_inputs,
)
from tests.lightning_liger.models_table import row

NOT_FUSED: dict[str, str] = {
    "musicgen": "its output embeddings are a list of heads, one for each codebook",
    "musicgen_melody": "its output embeddings are a list of heads, one for each codebook",
    "dory": "its head scales the logits of each token by a parameter",
}
"""Types whose loss is not fused, and why. That of every other type is."""

DOCUMENTED = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
IS_OLDEST = Version(transformers.__version__) < Version("5.18")
"""Whether this is the oldest version of transformers that is allowed, which has fewer types."""


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


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(model_type, marks=pytest.mark.skip(reason=UNBUILDABLE[model_type]))
        if model_type in UNBUILDABLE
        else model_type
        for model_type in CAUSAL_LM_TYPES
    ],
)
def test_patched_model_is_the_same_but_for_its_logits(model_type: str) -> None:
    model = stock_model(model_type)
    patched = copy.deepcopy(model)
    with torch.no_grad():
        want = logits_of(model.eval())
    wanted = train(model.train())  # what its modules set up once is set up now
    classes = [type(module) for module in patched.modules()]
    with nothing_else_changes(model, patched):
        report = apply_liger_kernels(patched)
        trained = train(patched)
    assert_same_training(model, *trained, *wanted)
    if f"in transformers {transformers.__version__}," in DOCUMENTED:
        assert f"\n{row(model_type, patched, report.entries)}" in DOCUMENTED
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


def test_nearly_every_architecture_is_covered() -> None:
    newer = {"dory"} if Version(transformers.__version__) < Version("5.24") else set()
    assert (NOT_FUSED.keys() | UNBUILDABLE.keys()) - newer <= set(CAUSAL_LM_TYPES)
    at_least = 170 if IS_OLDEST else 180
    assert len(CAUSAL_LM_TYPES) - len(NOT_FUSED) - len(UNBUILDABLE) >= at_least


@pytest.mark.parametrize("model_type", UNBUILDABLE)
def test_architecture_that_is_left_out_cannot_be_built(model_type: str) -> None:
    if model_type == "gemma3n" and importlib.util.find_spec("timm") is not None:
        pytest.skip("timm is installed")
    if model_type == "gemma4_assistant" and (IS_OLDEST or "forward" in UNBUILDABLE[model_type]):
        pytest.skip("this version builds it")
    with pytest.raises((ImportError, ValueError), match=r"timm|layer types"):
        tiny_causal_lm(model_type)
