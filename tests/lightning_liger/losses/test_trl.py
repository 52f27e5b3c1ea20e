"""Losses and metrics of preferences are those of TRL's own functions, where the package is installed."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_liger.losses import cpo, dpo, kto, orpo
from lightning_liger.losses.completions import Completions, sequence_sums

B, S = 4, 9
ACCELERATOR = SimpleNamespace(device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x)


def batch(seed: int) -> tuple[dict[str, Tensor], Any, Completions]:
    """Sequences of unequal lengths, and what a model with TRL's fused head returns of their tokens but the first."""
    generator = torch.Generator().manual_seed(seed)
    ends, positions = torch.randint(5, S + 1, (2 * B, 1), generator=generator), torch.arange(S)
    mask = (positions >= 2) & (positions < ends)
    inputs = dict.fromkeys(("input_ids", "attention_mask"), (positions < ends).long())
    inputs |= {"completion_mask": mask.long()}
    inputs |= {f"ref_{name}_logps": -torch.rand(B, generator=generator) * 10 for name in ("chosen", "rejected")}
    names = ("log_probs", "log_sum_sq_probs", "entropy", "mean_logits")
    scores = -torch.rand(len(names), 2 * B, S - 1, generator=generator) * 3 * mask[:, 1:]
    outputs = SimpleNamespace(**dict(zip(names, scores, strict=True)))
    outputs.leaf, outputs.is_top1 = outputs.log_probs.requires_grad_(), mask[:, 1:]
    outputs.log_probs = outputs.leaf * outputs.is_top1
    return inputs, outputs, Completions(mask[:, 1:])


def trl_loss(trainer: Any, options: Any, inputs: dict[str, Any], outputs: Any, **settings: Any) -> Any:
    metrics: Any = {"train": defaultdict(list)}
    model: Any = lambda **_: outputs  # noqa: E731
    model.training = True
    fields = {name: getattr(options, name) for name in options.__dataclass_fields__} | settings
    own = SimpleNamespace(
        **fields, model=model, _metrics=metrics, accelerator=ACCELERATOR, aux_loss_enabled=False,
        precompute_ref_logps=True, _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    return trainer._compute_loss(own, model, inputs, False), metrics["train"]


def pairs_of(inputs: dict[str, Tensor], outputs: Any, completions: Completions, ld_alpha: Any) -> dpo.PairLogProbs:
    weights = completions.mask if ld_alpha is None else completions.length_desensitized(ld_alpha)
    log_probs, numbers = outputs.log_probs, completions.lengths.chunk(2)
    chosen, rejected = sequence_sums(log_probs * weights).chunk(2)
    weight = dpo.wpo_weights(sequence_sums(log_probs), sequence_sums(outputs.log_sum_sq_probs), *numbers)
    references = inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]
    return dpo.PairLogProbs(chosen, rejected, *numbers, *references, weight, -sequence_sums(log_probs)[:B])


def test_dpo() -> None:
    trainer = pytest.importorskip("trl.trainer.dpo_trainer", exc_type=ImportError).DPOTrainer
    cases: list[dict[str, Any]] = [
        {"loss_type": kind, "f_divergence_type": divergence, "label_smoothing": 0.1 if kind in dpo._SMOOTHED else 0.0}
        for kind in dpo.LOSS_TYPES
        for divergence in (dpo.DIVERGENCES if kind in dpo._OF_DIFFERENCE else ("reverse_kl",))
    ]
    cases += [{"ld_alpha": 0.3}, {"use_weighting": True, "loss_type": "ipo"}]
    cases += [{"loss_type": ("sigmoid", "bco_pair", "sft"), "loss_weights": (0.8, 0.2, 1.0)}]
    for seed, case in enumerate(cases):
        options, (inputs, outputs, completions) = dpo.DPOOptions(**{"beta": 0.2} | case), batch(seed)
        settings = {"loss_types": options.loss_types, "loss_weights": options.loss_weights or [1.0]}
        args = SimpleNamespace(discopop_tau=options.discopop_tau)
        want, metrics = trl_loss(trainer, options, inputs, outputs, args=args, **settings)
        pairs = pairs_of(inputs, outputs, completions, options.ld_alpha)
        result = options.losses(pairs)
        got = result.losses.mean() + (0.0 if result.nll is None else result.nll.sum() / pairs.num_chosen.sum())
        gradients = [torch.autograd.grad(each, outputs.leaf, retain_graph=True)[0] for each in (got, want)]
        if options.loss_type == "discopop" and want.isnan():  # its m exp(-d) is 0 * inf for very negative d
            assert torch.cat((got[None], gradients[0].flatten())).isfinite().all()
            continue
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=lambda m, c=case: f"{c}: {m}")
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6, msg=lambda m, c=case: f"{c}: {m}")
        for name, vector in result.metrics.items():
            assert metrics[name] == [pytest.approx(float(vector.mean()), rel=1e-4, abs=1e-6)], name


def test_cpo_and_orpo() -> None:
    trainer = pytest.importorskip("trl.experimental.cpo.cpo_trainer", exc_type=ImportError).CPOTrainer
    pairs = pairs_of(*batch(0), ld_alpha=None)
    for kind in ("sigmoid", "hinge", "ipo", "simpo"):
        options = cpo.CPOOptions(kind, beta=0.7, alpha=0.2)
        given = pairs.averages if kind in ("ipo", "simpo") else pairs[:2]
        fields = {name: getattr(options, name) for name in options.__dataclass_fields__}
        want = trainer.cpo_loss(SimpleNamespace(**fields, accelerator=ACCELERATOR), *given)
        got = options.losses(pairs)
        found = got.losses, got.metrics["rewards/chosen"], got.metrics["rewards/rejected"]
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    trainer = pytest.importorskip("trl.experimental.orpo.orpo_trainer", exc_type=ImportError).ORPOTrainer
    want = trainer.odds_ratio_loss(SimpleNamespace(beta=0.3, accelerator=ACCELERATOR), *pairs.averages)
    got = orpo.ORPOOptions(0.3).losses(pairs)
    means = (got.metrics[name].mean() for name in ("log_odds_ratio", "log_odds_chosen"))
    found = -got.losses, got.metrics["rewards/chosen"], got.metrics["rewards/rejected"], *means
    torch.testing.assert_close(found, tuple(map(torch.as_tensor, want)))


def test_kto() -> None:
    trainer = pytest.importorskip("trl.trainer.kto_trainer", exc_type=ImportError).KTOTrainer
    (inputs, outputs, _), labels = batch(2), torch.arange(2 * B) % 3 == 0
    reference, mismatched, mismatched_ref = -torch.rand(3, 2 * B) * 10
    inputs |= {"label": labels, "ref_logps": reference, "ref_KL_logps": mismatched_ref}
    for kind in ("kto", "apo_zero_unpaired"):
        options = kto.KTOOptions(kind, 0.3, 1.3, 0.6)
        settings = {"calculate_KL": kind == "kto", "_compute_kl_logps": lambda *_: mismatched}
        want, metrics = trl_loss(trainer, options, inputs, outputs, **settings)
        kl = kto.kl_estimate((mismatched - mismatched_ref).sum(), 2 * B)
        losses, rewards = kto.kto_loss(sequence_sums(outputs.log_probs), reference, labels, options, baseline=kl)
        torch.testing.assert_close(losses.mean(), want)
        assert metrics["rewards/chosen"] == [pytest.approx(float(rewards[labels].mean()), rel=1e-5)]
