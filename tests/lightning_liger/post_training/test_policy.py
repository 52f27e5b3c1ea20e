"""``LigerPolicyMixin`` and ``LigerGRPO`` against a loop on a stock model, one sequence at a time, without padding."""

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch

from lightning_liger import LigerGRPO, apply_liger_kernels
from lightning_liger.lazy.logits import LazyLogits
from lightning_liger.losses.policy_options import PolicyOptions
from tests.lightning_liger.post_training.completion_batches import (
    COLUMNS,
    COMPLETIONS,
    PROMPTS,
    Policy,
    apart,
    expected_model,
    joined,
    packed,
    pad,
    sequences,
    stock_scores,
)
from tests.lightning_liger.post_training.training import assert_same_parameters, fit, metrics_of
from tests.lightning_liger.tiny import TINY_CONFIG, tiny_llama

CASES = {
    "dapo": {"beta": 0.1, "entropy_coef": 0.05, "vllm_importance_sampling_mode": "token_truncate"},
    "grpo": {"importance_sampling_level": "sequence", "entropy_coef": 0.05, "vllm_importance_sampling_clip_max": 50.0},
    "sapo": {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 5.0},
    "rloo": {"vllm_importance_sampling_clip_max": 50.0},
}


@pytest.mark.parametrize("loss_type", CASES)
def test_training_equals_a_loop_on_a_stock_model_however_a_step_is_split(loss_type: str) -> None:
    options = PolicyOptions(loss_type=loss_type, **CASES[loss_type])  # type: ignore[arg-type]
    per_token = loss_type == "sapo"
    examples = sequences(6, per_token=per_token)
    expected, losses = expected_model([examples, examples], options)
    # The second of the uneven micro-batches has no tokens at all.
    splits = {"whole": [examples], "uneven": [examples[:3], examples[3:4], examples[4:]]}
    for form, split in ((apart, "whole"), (apart, "uneven"), (joined, "uneven"), (packed, "uneven")):
        batches = [form(part) for part in splits[split]]
        module = Policy(options)
        fit(module, batches * 2, accumulate_grad_batches=len(batches))
        assert_same_parameters(module.model, expected)
        steps = [module.steps[len(batches) - 1]["train_loss_step"], module.steps[-1]["train_loss_step"]]
        assert steps == pytest.approx(losses, rel=1e-4)


def test_metrics_are_exact_over_micro_batches() -> None:
    options = PolicyOptions(loss_type="dapo", epsilon=0.3, beta=0.1, vllm_importance_sampling_mode="token_truncate")
    examples = sequences(6)
    for index, example in enumerate(examples):
        example["rewards"] = torch.tensor(float(index // 2))
        example["group_ids"] = torch.tensor(min(index // 2, 1) if index != 4 else 2)
    found = metrics_of(fit(Policy(options, learning_rate=0.0), [apart(examples[:2]), apart(examples[2:])]))
    with torch.no_grad():
        log_probs, entropies = stock_scores(tiny_llama(), examples)
    mask = pad([example["tool_mask"] for example in examples]).bool()
    old, ref, sampled = (pad([example[key] for example in examples]) for key in COLUMNS)
    advantages = torch.stack([example["advantages"] for example in examples])[:, None]
    ratio = (log_probs - old).exp()
    low, high = (ratio < 0.7) & (advantages < 0), (ratio > 1.3) & (advantages > 0)
    is_real = mask.any(1)
    share = [torch.stack([x[row][mask[row]].double().mean() for row in range(6) if is_real[row]]) for x in (low, high)]
    importance = (old - sampled).exp().clamp(max=3.0)[mask]
    kl = (((ref - log_probs).exp() - (ref - log_probs) - 1) * ratio)[mask]
    expected = {
        "entropy": entropies[mask].mean(),
        "kl": kl.mean(),
        "clip_ratio/low_mean": low[mask].double().mean(),
        "clip_ratio/high_mean": high[mask].double().mean(),
        "clip_ratio/region_mean": (low | high)[mask].double().mean(),
        "clip_ratio/low_min": share[0].min(),
        "clip_ratio/high_max": share[1].max(),
        "sampling/sampling_logp_difference/mean": (old - sampled).abs()[mask].mean(),
        "sampling/sampling_logp_difference/max": (old - sampled).abs()[mask].max(),
        "sampling/importance_sampling_ratio/min": importance.min(),
        "sampling/importance_sampling_ratio/mean": importance.mean(),
        "sampling/importance_sampling_ratio/max": importance.max(),
        "completions/mean_length": mask.sum(1).double().mean(),
        "completions/min_length": 0,
        "completions/max_length": mask.sum(1).max(),
        "num_tokens": sum(PROMPTS) + sum(COMPLETIONS),
        "reward": 1.0,
        "frac_reward_zero_std": 3 / 6,  # groups of rewards 0 0, 1 1 2, 2
    }
    for name, value in expected.items():
        assert found[f"train_{name}"] == pytest.approx(float(value), rel=1e-4, abs=1e-7), name
    assert 0 < found["train_clip_ratio/low_mean"] < 1
    assert not {name for name in found if "policy_loss" in name or "vespo" in name}
    found = metrics_of(fit(Policy(options), [apart(sequences(2, columns=COLUMNS[:2]))]))
    assert not [name for name in found if "sampling" in name or "reward" in name]


def test_share_of_completions_that_were_cut_off() -> None:
    examples = sequences(6, columns=COLUMNS[:1])
    for example in examples[::2]:
        example["completion_ids"][-1:] = 2  # the end of a text in the model's configuration
    examples[1]["completion_ids"][0] = 2  # where the text goes on
    kept = [example["tool_mask"].bool() for example in examples]
    last = [
        int(example["completion_ids"][mask][-1]) for example, mask in zip(examples, kept, strict=True) if mask.any()
    ]
    lengths = [int(mask.sum()) for mask in kept if mask.any()]
    ended = [length for length, token in zip(lengths, last, strict=True) if token == 2]
    assert 0 < len(ended) < len(last)
    for form in (apart, joined, packed):
        found = metrics_of(fit(Policy(PolicyOptions()), [form(examples[:3]), form(examples[3:])]))
        names = ("clipped_ratio", *(f"{extreme}_terminated_length" for extreme in ("mean", "min", "max")))
        values = [found[f"train_completions/{name}"] for name in names]
        expected = [1 - len(ended) / len(last), sum(ended) / len(ended), min(ended), max(ended)]
        assert values == pytest.approx(expected)
    module = Policy(PolicyOptions())
    module.model.config.eos_token_id = module.model.generation_config.eos_token_id = None
    assert not [name for name in fit(module, [apart(examples)]).callback_metrics if "terminated" in name]


def test_on_policy_batches_and_known_numbers_of_items() -> None:
    options = PolicyOptions(loss_type="dapo")
    examples = sequences(6, columns=())
    expected, losses = expected_model([examples], options)
    num_tokens = sum(int(example["tool_mask"].sum()) for example in examples)
    for changes, settings, factor in (
        ({}, {}, 1.0),
        ({"num_items_in_batch": torch.tensor(num_tokens)}, {}, 1.0),
        ({"num_items_in_batch": torch.tensor(2 * num_tokens)}, {"steps_per_generation": 4}, 1.0),
        ({"num_items_in_batch": torch.tensor(2 * num_tokens)}, {}, 0.5),
    ):
        module = Policy(options, **settings)
        fit(module, [apart(part) | changes for part in (examples[:2], examples[2:])], accumulate_grad_batches=2)
        assert module.steps[-1]["train_loss_step"] == pytest.approx(factor * losses[0], rel=1e-4)
        if factor == 1:
            assert_same_parameters(module.model, expected)


def test_top_entropy_and_off_policy_masks_train_the_tokens_that_they_keep() -> None:
    """The entropy bonus is the mean over the tokens that the entropy mask keeps."""
    examples = sequences(6, columns=COLUMNS[:1])
    for quantile, threshold in ((0.1, None), (0.3, None), (0.5, -0.3)):
        masks = {"top_entropy_quantile": quantile, "off_policy_mask_threshold": threshold}
        options = PolicyOptions(**masks, entropy_coef=0.1)
        expected, losses = expected_model([examples], options)
        module = Policy(options)
        fit(module, [apart(examples)])
        assert module.steps[0]["train_loss_step"] == pytest.approx(losses[0], rel=1e-4)
        assert_same_parameters(module.model, expected)


def test_per_token_log_probs_are_columns_of_the_batch() -> None:
    module = Policy(PolicyOptions())
    examples = sequences(6, columns=())
    expected, _ = stock_scores(tiny_llama(), examples)
    mask = pad([example["tool_mask"] for example in examples]).bool()
    batch = apart(examples)
    found = module.per_token_log_probs({key: value for key, value in batch.items() if key != "advantages"})
    torch.testing.assert_close(found.double(), expected.where(mask, 0).detach(), rtol=1e-5, atol=1e-5)
    on_policy = float(module.training_step(batch, 0).detach())
    assert module.training_step(batch | {"old_per_token_logps": found}, 0).item() == pytest.approx(on_policy, rel=1e-5)
    for form in (joined, packed):
        batch = form(examples)
        column = module.per_token_log_probs(batch)
        assert column.shape == batch["input_ids"].shape
        assert not column.requires_grad
        assert module.training_step(batch | {"old_per_token_logps": column}, 0).item() == pytest.approx(
            on_policy, rel=1e-5
        )


def test_losses_of_tokens_are_computed_in_the_loop_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    fused_loss: Any = LazyLogits.fused_loss
    watched = lambda self, op, *a, **k: called.append(op.__name__) or fused_loss(self, op, *a, **k)  # noqa: E731
    monkeypatch.setattr(LazyLogits, "fused_loss", watched)
    batch = apart(sequences(3))
    for changes, expected in (
        ({}, "linear_token_loss"),
        ({"entropy_coef": 0.1}, "linear_token_loss"),
        ({"loss_type": "grpo", "entropy_coef": 0.1}, "linear_log_probs"),
        ({"importance_sampling_level": "sequence"}, "linear_log_probs"),
        ({"top_entropy_quantile": 0.5}, "linear_log_probs"),
    ):
        module = Policy(PolicyOptions(**changes))
        apply_liger_kernels(module.model)
        called.clear()
        module.training_step(batch, 0).backward()
        assert called == [expected]


def grpo(**changes: Any) -> LigerGRPO:
    settings: dict[str, Any] = {"temperature": 1.3, "learning_rate": 0.01, "min_lr_ratio": 1.0, "beta": 0.5}
    return LigerGRPO(**{"config": TINY_CONFIG} | settings | changes)


def test_finished_module_trains_against_its_first_weights() -> None:
    batch = apart(sequences(6, columns=COLUMNS[:1]))
    module = grpo()
    fit(module, [batch] * 2)
    assert module.ref_model is not None
    first, last = (dict(model.named_parameters()) for model in (module.ref_model, module.model))
    assert all(not torch.equal(first[name], parameter) for name, parameter in last.items())
    by_column = grpo(reference="columns")
    by_column.model = module.model
    stored = batch | {"ref_per_token_logps": module.per_token_log_probs(batch, module.ref_model)}
    losses = [each.step_loss("val", data).terms[0].total for each, data in ((module, batch), (by_column, stored))]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0.0)
    assert grpo(beta=0.0).needs_reference is False

    pytest.importorskip("peft")
    module = grpo(lora={"r": 2, "target_modules": ["q_proj", "lm_head"], "init_lora_weights": False})
    trainer = fit(module, [batch])
    assert module.ref_model is None
    assert all("lora" in name for name, parameter in module.model.named_parameters() if parameter.requires_grad)
    assert float(trainer.callback_metrics["train_kl"]) > 0  # adapters start different from zero


def test_every_option_is_an_argument_with_the_same_default_and_reaches_the_loss() -> None:
    parameters = inspect.signature(LigerGRPO.__init__).parameters
    for each in fields(PolicyOptions):
        assert not each.init or parameters[each.name].default == each.default
        assert not each.init or f"    {each.name}: " in (LigerGRPO.__init__.__doc__ or "")
    module = grpo(loss_type="rloo", beta=0.0, entropy_coef=0.5, steps_per_generation=3)
    assert module.policy_options == PolicyOptions(loss_type="rloo", entropy_coef=0.5)
    assert (module.temperature, module.steps_per_generation, module.disable_dropout) == (1.3, 3, False)
