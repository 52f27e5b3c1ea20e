"""``LigerPolicyMixin`` against a loop by hand on a stock model, one sequence at a time, without padding."""

import math
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_liger.lazy.logits import LazyLogits
from lightning_liger.losses.completions import Completions
from lightning_liger.losses.policy_batch import PolicyBatch
from lightning_liger.losses.policy_options import PolicyOptions
from lightning_liger.post_training.policy import LigerPolicyMixin
from tests.lightning_liger.losses.policy_batches import naive_loss
from tests.lightning_liger.tiny import tiny_llama

Batch = dict[str, Any]
TEMPERATURE = 1.3
PROMPTS, COMPLETIONS = (3, 1, 4, 2, 5, 2), (4, 6, 1, 0, 5, 3)
COLUMNS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")


def sequences(number: int, *, of_tokens: bool = False, columns: tuple[str, ...] = COLUMNS, seed: int = 0) -> list[Batch]:
    """Single sequences of a batch, each with its values."""
    random = torch.Generator().manual_seed(seed)
    result = []
    for prompt, length in zip(PROMPTS[:number], COMPLETIONS[:number], strict=True):
        prompt_ids = torch.randint(3, 131, (prompt,), generator=random)
        completion_ids = torch.randint(3, 131, (length,), generator=random)
        advantages = torch.randn(length if of_tokens else (), generator=random)
        values = {key: -torch.rand(length, generator=random) * 2 - 4 for key in COLUMNS}
        mask = (torch.arange(length) != 2).long()  # a tool's token
        example = {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "advantages": advantages}
        result.append(example | {"tool_mask": mask} | {key: values[key] for key in columns})
    return result


def pad(rows: list[Tensor], left: bool = False, value: float = 0) -> Tensor:
    length = max(1, *map(len, rows))
    sides = [(length - len(row), 0) if left else (0, length - len(row)) for row in rows]
    padded = [torch.nn.functional.pad(row, side, value=value) for row, side in zip(rows, sides, strict=True)]
    return torch.stack(padded)


def apart(examples: list[Batch]) -> Batch:
    """As TRL's batches: prompts padded on the left, completions on the right."""
    columns = {key: [example[key] for example in examples] for key in examples[0]}
    batch: Batch = {}
    for name in ("prompt", "completion"):
        ids = columns.pop(f"{name}_ids")
        batch[f"{name}_ids"] = pad(ids, left=name == "prompt")
        batch[f"{name}_mask"] = pad([torch.ones_like(row) for row in ids], left=name == "prompt")
    for key, values in columns.items():
        batch[key] = torch.stack(values) if values[0].ndim == 0 else pad(values)
    return batch


def joined(examples: list[Batch]) -> Batch:
    """Rows of ``input_ids``, padded on the right."""
    columns = rows_of(examples)
    batch = {key: torch.stack(values) if values[0].ndim == 0 else pad(values) for key, values in columns.items()}
    batch["attention_mask"] = pad([torch.ones_like(row) for row in columns["input_ids"]])
    return batch


def packed(examples: list[Batch]) -> Batch:
    """One row of all sequences."""
    columns = rows_of(examples)
    batch = {
        key: torch.stack(values) if values[0].ndim == 0 else torch.cat(values)[None] for key, values in columns.items()
    }
    lengths = [len(row) for row in columns["input_ids"]]
    batch["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
    batch["sequence_ids"] = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    return batch | {"num_sequences": len(lengths)}


def rows_of(examples: list[Batch]) -> dict[str, list[Tensor]]:
    columns: dict[str, list[Tensor]] = {}
    for example in examples:
        prompt, completion = example["prompt_ids"], example["completion_ids"]
        row = {"input_ids": torch.cat((prompt, completion))}
        row["completion_mask"] = torch.cat((torch.zeros_like(prompt), torch.ones_like(completion)))
        for key, value in example.items():
            if not key.endswith("_ids"):
                at_tokens = value.ndim and torch.cat((torch.zeros(len(prompt), dtype=value.dtype), value))
                row[key] = at_tokens if value.ndim else value
        for key, value in row.items():
            columns.setdefault(key, []).append(value)
    return columns


class Policy(LigerPolicyMixin, L.LightningModule):
    """A tiny Llama with SGD."""

    temperature = TEMPERATURE

    def __init__(self, options: PolicyOptions, **settings: Any) -> None:
        self.policy_options = options
        for name, value in settings.items():
            setattr(self, name, value)
        super().__init__()
        self.steps: list[dict[str, float]] = []
        self.calls: list[str] = []

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = tiny_llama()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})


def fit(module: L.LightningModule, batches: list[Batch], strategy: str = "liger", **options: Any) -> L.Trainer:
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches, batch_size=None, shuffle=False))  # type: ignore[arg-type]
    return trainer


def stock_scores(model: torch.nn.Module, examples: list[Batch]) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of completions' tokens, each sequence computed alone."""
    rows = []
    for example in examples:
        ids = torch.cat((example["prompt_ids"], example["completion_ids"]))
        logits = model(input_ids=ids[None]).logits[0, len(example["prompt_ids"]) - 1 : -1] / TEMPERATURE
        log_p = logits.double().log_softmax(-1)
        rows.append((log_p.gather(1, example["completion_ids"][:, None])[:, 0], -(log_p.exp() * log_p).sum(1)))
    return pad([log_probs for log_probs, _ in rows]), pad([entropy for _, entropy in rows])


def expected_loss(model: torch.nn.Module, examples: list[Batch], options: PolicyOptions) -> Tensor:
    log_probs, entropies = stock_scores(model, examples)
    columns = {key: pad([example[key] for example in examples]).double() for key in COLUMNS if key in examples[0]}
    advantages = [example["advantages"].double() for example in examples]
    mask = pad([example["tool_mask"] for example in examples]).bool()
    batch = PolicyBatch(
        Completions(mask), pad(advantages) if advantages[0].ndim else torch.stack(advantages), *map(columns.get, COLUMNS)
    )
    return naive_loss(log_probs, batch, options) - options.entropy_coef * entropies[mask].mean()


def expected_model(steps: list[list[Batch]], options: PolicyOptions) -> tuple[torch.nn.Module, list[float]]:
    model, losses = tiny_llama(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for examples in steps:
        optimizer.zero_grad()
        loss = expected_loss(model, examples, options)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses


def assert_same_weights(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    stock = dict(expected.named_parameters())
    moved = 0.0
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, stock[name], rtol=2e-4, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")
        moved = max(moved, float((stock[name] - dict(tiny_llama().named_parameters())[name]).abs().max().detach()))
    assert moved > 1e-3


CASES = {
    "dapo": {"beta": 0.1, "entropy_coef": 0.05, "vllm_importance_sampling_mode": "token_truncate"},
    "grpo": {"importance_sampling_level": "sequence", "entropy_coef": 0.05, "vllm_importance_sampling_clip_max": 50.0},
    "sapo": {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 5.0},
    "rloo": {"vllm_importance_sampling_clip_max": 50.0},
}


@pytest.mark.parametrize("loss_type", CASES)
def test_training_equals_a_loop_on_a_stock_model_however_a_step_is_split(loss_type: str) -> None:
    options = PolicyOptions(loss_type=loss_type, **CASES[loss_type])  # type: ignore[arg-type]
    of_tokens = loss_type == "sapo"
    examples = sequences(6, of_tokens=of_tokens)
    expected, losses = expected_model([examples, examples], options)
    splits = {"whole": [examples], "uneven": [examples[:1], examples[1:4], examples[4:]]}
    for form, split in ((apart, "whole"), (apart, "uneven"), (joined, "uneven"), (packed, "uneven")):
        batches = [form(part) for part in splits[split]]
        module = Policy(options)
        fit(module, batches * 2, accumulate_grad_batches=len(batches))
        assert_same_weights(module.model, expected)
        steps = [module.steps[len(batches) - 1]["train_loss_step"], module.steps[-1]["train_loss_step"]]
        assert steps == pytest.approx(losses, rel=1e-4)


def test_metrics_are_exact_over_micro_batches() -> None:
    options = PolicyOptions(loss_type="dapo", epsilon=0.3, beta=0.1, vllm_importance_sampling_mode="token_truncate")
    examples = sequences(6)
    for index, example in enumerate(examples):
        example["rewards"] = torch.tensor(float(index // 2))
        example["group_ids"] = torch.tensor(min(index // 2, 1) if index != 4 else 2)
    module = Policy(options)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)  # type: ignore[method-assign]
    trainer = fit(module, [apart(examples[:2]), apart(examples[2:])])
    found = {name: value.item() for name, value in trainer.callback_metrics.items()}

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
    module = Policy(options)
    trainer = fit(module, [apart(sequences(2, columns=COLUMNS[:2]))])
    assert not [name for name in trainer.callback_metrics if "sampling" in name or "reward" in name]


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
            assert_same_weights(module.model, expected)


def test_top_entropy_and_off_policy_masks_train_the_tokens_that_they_keep() -> None:
    examples = sequences(6, columns=COLUMNS[:1])
    stock = tiny_llama()
    log_probs, entropies = stock_scores(stock, examples)
    mask = pad([example["tool_mask"] for example in examples]).bool()
    kept = mask & (entropies >= torch.quantile(entropies[mask], 0.5))
    old = pad([example["old_per_token_logps"] for example in examples]).double()
    advantages = torch.stack([example["advantages"] for example in examples]).double()
    of_row = torch.where(mask, old - log_probs.detach(), 0).sum(1) / mask.sum(1).clamp(min=1)
    near = (advantages >= 0) | (of_row <= -0.3)
    assert 0 < (~near).sum() < 6
    kept &= near[:, None]
    ratio = (log_probs - old).exp()
    objective = torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    (-objective[kept].sum() / mask.sum()).backward()
    torch.optim.SGD(stock.parameters(), lr=0.3).step()
    module = Policy(PolicyOptions(top_entropy_quantile=0.5, off_policy_mask_threshold=-0.3))
    fit(module, [apart(examples)])
    assert_same_weights(module.model, stock)


def test_adaptive_entropy_coefficient_follows_its_target(tmp_path: Any) -> None:
    settings: dict[str, Any] = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_delta": 0.04}
    batches = [apart(sequences(3, columns=(), seed=seed)) for seed in range(3)]
    high, low = (Policy(PolicyOptions(**settings, entropy_target=target)) for target in (100.0, 0.0))
    fit(high, batches)
    fit(low, batches)
    for module, coefficients in ((high, [0.1, 0.14, 0.18]), (low, [0.1, 0.06, 0.02])):
        assert [step["train_entropy_coef_step"] for step in module.steps] == pytest.approx(coefficients, rel=1e-5)
    for module, applied in ((high, [0, 0.14, 0.18]), (low, [0, 0, 0])):  # never in the first step
        for step, coefficient in zip(module.steps, applied, strict=True):
            bonus = step["train_policy_loss_step"] - step["train_loss_step"]
            assert bonus == pytest.approx(coefficient * step["train_entropy_step"], rel=1e-4, abs=1e-6)
    checkpoint: dict[str, Any] = {}
    high.on_save_checkpoint(checkpoint)
    resumed = Policy(high.policy_options)
    resumed.on_load_checkpoint(checkpoint)
    assert float(resumed._entropy_coefficient.current(torch.device("cpu"))) == pytest.approx(0.22)
    assert float(resumed._entropy_coefficient.applied(torch.device("cpu"))) == pytest.approx(0.22)


@pytest.mark.filterwarnings("ignore:You are trying to `self.log\\(\\)`")
def test_per_token_log_probs_are_columns_of_the_batch() -> None:
    module = Policy(PolicyOptions())
    module.configure_model()
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
        assert column.shape == batch["input_ids"].shape and not column.requires_grad
        assert module.training_step(batch | {"old_per_token_logps": column}, 0).item() == pytest.approx(on_policy, rel=1e-5)


@pytest.mark.filterwarnings("ignore:You are trying to `self.log\\(\\)`")
def test_losses_of_tokens_are_computed_in_the_loop_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_liger import apply_liger_kernels

    called: list[str] = []
    for name in ("token_loss", "token_scores"):
        method = getattr(LazyLogits, name)

        def watched(self: Any, *args: Any, name: str = name, method: Any = method, **kwargs: Any) -> Any:
            called.append(name)
            return method(self, *args, **kwargs)

        monkeypatch.setattr(LazyLogits, name, watched)
    batch = apart(sequences(3))
    for changes, expected in (
        ({}, "token_loss"),
        ({"entropy_coef": 0.1}, "token_loss"),
        ({"loss_type": "grpo", "entropy_coef": 0.1}, "token_scores"),
        ({"importance_sampling_level": "sequence"}, "token_scores"),
        ({"top_entropy_quantile": 0.5}, "token_scores"),
    ):
        module = Policy(PolicyOptions(**changes))
        module.configure_model()
        apply_liger_kernels(module.model)
        called.clear()
        module.training_step(batch, 0).backward()
        assert called == [expected]


def test_lora_trains_adapters_of_the_head_too() -> None:
    peft = pytest.importorskip("peft")
    options = PolicyOptions(loss_type="grpo", importance_sampling_level="sequence", epsilon=3.0)

    def adapted() -> torch.nn.Module:
        config = peft.LoraConfig(r=3, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return peft.get_peft_model(tiny_llama(), config)

    examples = sequences(6)
    for example in examples:
        del example["sampling_per_token_logps"]
    stock = adapted()
    expected_loss(stock, examples, options).backward()
    torch.optim.SGD(stock.parameters(), lr=0.3).step()
    module = Policy(options)
    module.model = adapted()
    fit(module, [apart(examples[:3]), apart(examples[3:])], accumulate_grad_batches=2)
    before = dict(adapted().named_parameters())
    moved = []
    for (name, parameter), expected in zip(module.model.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=2e-4, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")
        if not torch.equal(parameter, before[name]):
            moved.append(name)
    assert len(moved) == 6 and all("lora" in name for name in moved)
