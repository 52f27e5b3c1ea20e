"""Plain calls of patched models do not look for documents, for which the host would wait; all others may."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, masking_utils

from lightning_liger import apply_liger_kernels
from lightning_liger.sequences.context_parallel import CACHE
from lightning_liger.sequences.empty_cache import EmptyCache
from tests.lightning_liger.architectures import tiny_causal_lm
from tests.lightning_liger.tiny import tiny_batch

IDS = tiny_batch()["input_ids"]


def given_cache(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The cache with which a model's forward is called."""
    seen: list[Any] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs.get(CACHE)), with_kwargs=True
    )
    model(*args, **kwargs)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma3_text", "qwen3_moe"])
def test_plain_training_is_the_same_without_looking_for_documents(model_type: str, monkeypatch: Any) -> None:
    stock = tiny_causal_lm(model_type)
    patched = copy.deepcopy(stock)
    apply_liger_kernels(patched, "linear_cross_entropy")
    looked: list[Any] = []
    look = masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(
        masking_utils, "find_packed_sequence_indices", lambda *args, **kwargs: looked.append(1) or look(*args, **kwargs)
    )
    results = []
    for model, num_looked in ((stock, 1), (patched, 0)):
        looked.clear()
        output = model(input_ids=IDS, labels=IDS)
        assert min(len(looked), 1) == num_looked
        assert output.get(CACHE) is None
        output.loss.backward()
        results.append([output.loss.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "more",
    [
        {"position_ids": torch.arange(IDS.shape[1]).expand(len(IDS), -1)},
        {"attention_mask": torch.ones_like(IDS)},
        {"use_cache": True},
        {CACHE: DynamicCache()},
        {CACHE: None},  # whoever says so means it
        {"return_dict": False},
    ],
    ids=lambda more: next(iter(more)),
)
def test_calls_that_ask_for_something_are_left_alone(more: dict[str, Any]) -> None:
    model = tiny_causal_lm("llama")
    apply_liger_kernels(model)
    assert type(given_cache(model, IDS)) is EmptyCache
    assert type(given_cache(model, input_ids=IDS, labels=IDS, attention_mask=None)) is EmptyCache
    assert given_cache(model, input_ids=IDS, **more) is more.get(CACHE)
    model.config.use_cache = True
    assert given_cache(model, IDS) is None
    assert type(given_cache(model, IDS, use_cache=False)) is EmptyCache


@pytest.mark.parametrize("model_type", ["gpt2", "jamba", "blt"])
def test_models_with_other_caches_get_none(model_type: str) -> None:
    model = tiny_causal_lm(model_type)
    apply_liger_kernels(model)
    assert given_cache(model, input_ids=IDS) is None


def test_copies_and_pickles_keep_it_and_undo_removes_it() -> None:
    model = tiny_causal_lm("llama")
    report = apply_liger_kernels(model)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(given_cache(each, IDS)) is EmptyCache
    report.undo()
    assert given_cache(model, IDS) is None


def test_model_inside_of_a_wrapper_gets_it() -> None:
    class Wrapper(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> Any:
            return self.model(input_ids=ids, labels=ids).loss

    wrapper = Wrapper(tiny_causal_lm("llama"))
    apply_liger_kernels(wrapper)
    assert type(given_cache(wrapper.model, input_ids=IDS)) is EmptyCache
    torch._dynamo.reset()
    compiled = torch.compile(wrapper, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(IDS), wrapper(IDS))


def test_models_that_recompute_layers_get_none_from_then_on() -> None:
    """With activation checkpointing of its own, transformers warns of caches."""
    model = tiny_causal_lm("llama").train()
    apply_liger_kernels(model, "linear_cross_entropy")
    assert isinstance(given_cache(model, IDS), EmptyCache)
    model.gradient_checkpointing_enable()
    assert given_cache(model, IDS) is None
    model.gradient_checkpointing_disable()
    assert isinstance(given_cache(model, IDS), EmptyCache)
