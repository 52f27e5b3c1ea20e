"""Losses and metrics are those of TRL's own functions, where the package is installed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_liger.losses import dpo
from lightning_liger.losses.completions import Completions, sequence_sums

B, S, V = 4, 9, 13


class Accelerator:
    """Of one process."""

    device = torch.device("cpu")

    @staticmethod
    def gather(value: Tensor) -> Tensor:
        return value

    gather_for_metrics = gather


def batch(seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Sequences of unequal lengths, and logits for each token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(V, (2 * B, S), generator=generator)
    ends = torch.randint(5, S + 1, (2 * B, 1), generator=generator)
    positions = torch.arange(S)
    inputs = {
        "input_ids": ids,
        "attention_mask": (positions < ends).long(),
        "completion_mask": ((positions >= 2) & (positions < ends)).long(),
        "ref_chosen_logps": -torch.rand(B, generator=generator) * 10,
        "ref_rejected_logps": -torch.rand(B, generator=generator) * 10,
    }
    return inputs, torch.randn(2 * B, S, V, generator=generator)


def outputs_of(logits: Tensor, labels: Tensor) -> Any:
    """What a model with TRL's fused head returns."""
    labels, log_probs = labels[:, 1:], logits[:, :-1].log_softmax(-1)
    kept = labels != -100

    def masked(value: Tensor) -> Tensor:
        return torch.where(kept, value, torch.zeros_like(value))

    return SimpleNamespace(
        log_probs=masked(log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]),
        entropy=masked(-(log_probs.exp() * log_probs).sum(-1)),
        log_sum_sq_probs=masked((2 * log_probs).logsumexp(-1)),
        mean_logits=masked(logits[:, :-1].mean(-1)),
        is_top1=(log_probs.argmax(-1) == labels) & kept,
    )


def trl_dpo(
    options: dpo.DPOOptions, inputs: dict[str, Tensor], logits: Tensor
) -> tuple[Tensor, dict[str, list[float]]]:
    trainer = pytest.importorskip("trl.trainer.dpo_trainer", exc_type=ImportError).DPOTrainer
    from collections import defaultdict

    metrics: Any = {"train": defaultdict(list)}
    model: Any = lambda labels, **_: outputs_of(logits, labels)  # noqa: E731
    model.training = True
    fields = {name: getattr(options, name) for name in options.__dataclass_fields__}
    fields["loss_weights"] = options.loss_weights or [1.0] * len(options.loss_types)
    own = SimpleNamespace(
        **fields, model=model, _metrics=metrics,
        accelerator=Accelerator(), aux_loss_enabled=False, precompute_ref_logps=True, loss_types=options.loss_types,
        args=SimpleNamespace(discopop_tau=options.discopop_tau), _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    return trainer._compute_loss(own, model, inputs, False), metrics["train"]


def our_pairs(options: dpo.DPOOptions, inputs: dict[str, Tensor], logits: Tensor) -> dpo.PairLogProbs:
    mask = F.pad(inputs["completion_mask"][:, 1:], (0, 1)).bool()
    scores = outputs_of(logits, inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100))
    log_probs, numbers = F.pad(scores.log_probs, (0, 1)), sequence_sums(mask)
    weights = mask if options.ld_alpha is None else Completions(mask).length_desensitized(options.ld_alpha)
    chosen, rejected = sequence_sums(log_probs * weights).chunk(2)
    plain = sequence_sums(log_probs)
    weight = dpo.wpo_weights(plain, sequence_sums(scores.log_sum_sq_probs), *numbers.chunk(2))
    return dpo.PairLogProbs(chosen, rejected, *numbers.chunk(2), inputs["ref_chosen_logps"],
                            inputs["ref_rejected_logps"], weight, -plain[:B])  # fmt: skip


def test_dpo() -> None:
    cases: list[dict[str, Any]] = [
        {"loss_type": kind, "label_smoothing": 0.1 if kind in dpo._SMOOTHED else 0.0} for kind in dpo.LOSS_TYPES
    ]
    cases += [
        {"loss_type": kind, "f_divergence_type": divergence, "label_smoothing": 0.1 if kind in dpo._SMOOTHED else 0.0}
        for kind in sorted(dpo._OF_DIFFERENCE)
        for divergence in dpo.DIVERGENCES[1:]
    ]
    cases += [{"ld_alpha": 0.3}, {"use_weighting": True, "loss_type": "ipo"}]
    cases += [{"loss_type": ("sigmoid", "bco_pair", "sft"), "loss_weights": (0.8, 0.2, 1.0)}]
    for seed, case in enumerate(cases):
        options = dpo.DPOOptions(**{"beta": 0.2} | case)
        inputs, logits = batch(seed)
        results = []
        for compute in (trl_dpo, our_pairs):
            leaf = logits.clone().requires_grad_()
            result = compute(options, inputs, leaf)
            if compute is our_pairs:
                losses = options.losses(result)
                nll = 0.0 if losses.nll is None else losses.nll.sum() / result.num_chosen.sum()
                result = losses.losses.mean() + nll, losses.metrics
            results.append((result[0], torch.autograd.grad(result[0], leaf)[0], result[1]))
        (want, want_gradient, want_metrics), (got, got_gradient, got_metrics) = results
        if options.loss_type == "discopop" and want.isnan():  # its m exp(-d) is 0 * inf for very negative d
            assert got.isfinite()
            assert got_gradient.isfinite().all()
            continue
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=lambda m, c=case: f"{c}: {m}")
        torch.testing.assert_close(got_gradient, want_gradient, rtol=1e-4, atol=1e-6, msg=lambda m, c=case: f"{c}: {m}")
        for name, vector in got_metrics.items():
            assert want_metrics[name] == [pytest.approx(float(vector.mean()), rel=1e-4, abs=1e-6)], name
