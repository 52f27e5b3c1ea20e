"""Adapters of the package peft: on what is patched, in it, and on the LM head."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_liger import LazyLogits, apply_liger_kernels, divergence, lazy_logits, token_scores
from tests.lightning_liger.patching.rules.comparing import assert_same_gradients
from tests.lightning_liger.tiny import TensorSizes, tiny_batch, tiny_model

peft = pytest.importorskip("peft")

EVERYWHERE = ["q_proj", "k_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "backbone": ("llama", {"target_modules": ["q_proj", "gate_proj"]}),
    "everywhere": ("llama", {"target_modules": EVERYWHERE}),
    "head_saved_whole": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "packed": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj", "lm_head"]}),
    "scaled_logits": ("granite", {"target_modules": EVERYWHERE}),
    "capped_logits": ("gemma2", {"target_modules": ["q_proj", "lm_head"]}),
}


def with_adapters(model_type: str, settings: dict[str, Any], **overrides: Any) -> nn.Module:
    torch.manual_seed(0)
    config = peft.LoraConfig(**({"r": 4, "lora_alpha": 10, "lora_dropout": 0.0} | settings))
    model = peft.get_peft_model(tiny_model(model_type, **overrides), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # the second factor starts as zeros, which would hide it
            nn.init.normal_(parameter, std=0.3)
    return model


def head_counters(model: nn.Module) -> list[Any]:
    return [vars(module)["fusion_counters"] for module in model.modules() if "fusion_counters" in vars(module)]


@pytest.mark.parametrize("name", CONFIGS)
def test_adapted_model_computes_the_same_fused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_adapters(*CONFIGS[name])
    patched = copy.deepcopy(model)
    report = apply_liger_kernels(patched)
    kernels = {entry.kernel for entry in report.entries if entry.replacement}
    assert len(kernels) == 4
    assert {"rms_norm", "rope", "linear_cross_entropy"} < kernels  # and that of the gated MLP
    batch = tiny_batch(batch_size=4, seq_len=23)  # more tokens than any tensor has columns
    loss = model(**batch).loss
    loss.backward()
    with TensorSizes(monkeypatch) as sizes:
        fused_loss = patched(**batch).loss
        fused_loss.backward()
    torch.testing.assert_close(fused_loss, loss, rtol=1e-5, atol=0)
    assert_same_gradients(model, patched)
    assert sum(counters.num_losses for counters in head_counters(patched)) == 1
    assert sum(counters.num_materialized for counters in head_counters(patched)) == 0
    assert sizes.largest < batch["labels"].numel() * model.get_base_model().config.vocab_size
    with torch.no_grad():
        inputs = {"input_ids": batch["input_ids"]}
        torch.testing.assert_close(patched(**inputs).logits, model(**inputs).logits)


def test_disabled_and_merged_adapters_are_left_out() -> None:
    model = with_adapters(*CONFIGS["everywhere"])
    expected = model(**tiny_batch()).loss
    with model.disable_adapter():
        without = model(**tiny_batch()).loss
    apply_liger_kernels(model)
    torch.testing.assert_close(model(**tiny_batch()).loss, expected)
    with model.disable_adapter():
        torch.testing.assert_close(model(**tiny_batch()).loss, without)
    torch.testing.assert_close(model.merge_and_unload()(**tiny_batch()).loss, expected)


@pytest.mark.parametrize("name", ["everywhere", "head_saved_whole", "scaled_logits", "capped_logits", "two_active"])
def test_scores_and_divergences_are_those_of_the_adapted_head_and_of_the_base_model(name: str) -> None:
    model = with_adapters(*CONFIGS["everywhere" if name == "two_active" else name])
    if name == "two_active":
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["lm_head"]))
        model.base_model.set_adapter(["default", "second"])
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.requires_grad and parameter.shape[0] != 2)
        nn.init.normal_(model.base_model.model.lm_head.lora_B["second"].weight, std=0.3)
    patched = copy.deepcopy(model)
    apply_liger_kernels(patched)
    batch = tiny_batch()
    results = []
    for each in (model, patched):
        logits = each(input_ids=batch["input_ids"]).logits
        with torch.no_grad(), lazy_logits(), each.disable_adapter():
            reference = each(input_ids=batch["input_ids"]).logits
        assert isinstance(logits, LazyLogits) == isinstance(reference, LazyLogits) == (each is patched)
        scores = token_scores(logits, batch["labels"], outputs=("log_probs", "entropy"), temperature=0.8)
        before = token_scores(reference, batch["labels"]).log_probs
        ratio = torch.exp(scores.log_probs - before)
        loss = ratio.mean() - scores.entropy.mean() + divergence(logits, reference, kind="reverse_kl")
        loss.backward()
        results.append(loss.detach())
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=0)
    assert_same_gradients(model, patched)
    assert sum(counters.num_materialized for counters in head_counters(patched)) == 0


class Allocations(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes, views of others left out."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [
            [leaf for leaf in tree_leaves(each) if isinstance(leaf, Tensor)] for each in ((args, kwargs), result)
        ]
        given, made = ({leaf.untyped_storage().data_ptr(): leaf.numel() for leaf in each} for each in tensors)
        self.largest = max(self.largest, *(made[place] for place in made.keys() - given.keys()), 0)
        return result


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_experts_train_the_same_without_a_tensor_of_their_weights_size(
    model_type: str,
) -> None:
    sizes = {"num_experts": 24, "num_local_experts": 24, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    names = ["experts.gate_up_proj", "experts.down_proj"]
    model = with_adapters(
        model_type, {"target_modules": ["q_proj"], "target_parameters": names}, intermediate_size=32, **sizes
    )
    patched = copy.deepcopy(model)
    entries = {entry.structure: entry for entry in apply_liger_kernels(patched).entries}
    assert (entries["ParamWrapper"].count, entries["ParamWrapper"].reason) == (4, "")
    losses: list[list[float]] = []
    largest = []
    for each in (model, patched):
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.05)
        losses.append([])
        with Allocations() as seen:
            for seed in range(5):
                loss = each(**tiny_batch(seed=seed)).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[-1].append(loss.item())
        largest.append(seen.largest)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert len({round(loss, 2) for loss in losses[0]}) == 5
    assert largest[1] < 24 * 32 * 32 < 2 * 24 * 32 * 32 <= largest[0]
    torch.testing.assert_close(patched.state_dict(), model.state_dict(), rtol=1e-3, atol=1e-4)
    batch = {"input_ids": tiny_batch()["input_ids"]}
    with torch.no_grad():
        expected = patched(**batch).logits + 0
        torch.testing.assert_close(patched.merge_and_unload()(**batch).logits + 0, expected, rtol=1e-3, atol=1e-3)


def resized(model: Any) -> None:
    model.resize_token_embeddings(model.config.vocab_size + 8)


def with_lora_of_the_head(model: Any) -> None:
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"], r=2))


@pytest.mark.parametrize("change", [resized, with_lora_of_the_head])
def test_head_that_comes_after_the_kernels_is_warned_of(change: Callable[[Any], None]) -> None:
    model = tiny_model("llama")
    apply_liger_kernels(model)
    change(model)
    batch = tiny_batch()
    with pytest.warns(UserWarning, match=r"head of LlamaForCausalLM was replaced .*apply_liger_kernels\(model\) again"):
        model(**batch)
    apply_liger_kernels(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(model(**batch).logits, LazyLogits)
