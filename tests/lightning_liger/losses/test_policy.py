"""Policy-gradient losses and their gradients against loops over tokens in float64, and what they must not depend on."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_ops import TokenScores
from lightning_liger.losses.completions import Completions
from lightning_liger.losses.policy import kl_estimate, num_units
from lightning_liger.losses.policy_batch import (
    PolicyBatch,
    check_policy_batch,
    is_token_local,
    policy_objective,
    token_objective,
)
from lightning_liger.losses.policy_options import LOSS_TYPES, PolicyOptions
from lightning_liger.losses.policy_weights import num_top_entropies, sampling_ratio, top_entropy_mask
from tests.lightning_liger.losses.policy_batches import (
    LENGTHS,
    TOKEN_TYPES,
    naive_loss,
    naive_sampling_ratio,
    options_for,
    packed_batch,
    padded_batch,
)

TOKEN_MODE = {"vllm_importance_sampling_mode": "token_truncate"}


def loss_of(log_probs: Tensor, entropies: Tensor, batch: PolicyBatch, options: PolicyOptions) -> Tensor:
    check_policy_batch(batch, options)
    return policy_objective(log_probs, entropies, batch, options).total / num_units(batch.completions, options)


def variants(loss_type: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Options with the batches that they apply to."""
    of_sequence: dict[str, Any] = {"importance_sampling_level": "sequence"}
    if loss_type == "rloo":
        return [({}, {}), ({}, {"old": False}), ({"epsilon_high": None}, {"sampled": True})]
    result: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {}), ({}, {"old": False})]
    result += [({"beta": 0.3}, {"ref": True}), ({"beta": 0.3, "use_bias_correction_kl": False}, {"ref": True})]
    result += [({}, {"of_tokens": True}), ({"off_policy_mask_threshold": 0.05}, {"sampled": True, "of_tokens": True})]
    result += [({"off_policy_mask_threshold": 0.02}, {}), (TOKEN_MODE, {"sampled": True})]
    result += [(TOKEN_MODE, {"sampled": True, "old": False})]
    if loss_type == "vespo":
        return result
    result += [({**of_sequence, "beta": 0.2}, {"ref": True}), (of_sequence, {"of_tokens": True})]
    result += [({}, {"sampled": True}), ({}, {"sampled": True, "old": False})]
    if loss_type in ("grpo", "luspo"):
        result += [({"delta": 1.2}, {}), ({**of_sequence, "delta": 1.16}, {})]
    return result


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_losses_and_gradients_equal_the_published_formulas(loss_type: str) -> None:
    for changes, kinds in variants(loss_type):
        options = options_for(loss_type, **changes)
        for seed in (0, 1):
            log_probs, entropies, batch = padded_batch(**kinds, seed=seed)
            expected_input = log_probs.clone().requires_grad_()
            expected = naive_loss(expected_input, batch, options)
            (expected_gradient,) = torch.autograd.grad(expected, expected_input)
            for make in (lambda *x: x, packed_batch):
                ours = log_probs.clone().requires_grad_()
                loss = loss_of(*make(ours, entropies, batch), options)
                (gradient,) = torch.autograd.grad(loss, ours)
                case = f"{changes} {kinds} {seed} {make.__name__}"
                torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-13, msg=case)
                torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-13, msg=case)
                assert not gradient[~batch.completions.mask].any()


@pytest.mark.parametrize("loss_type", TOKEN_TYPES)
def test_token_local_losses_are_the_same_in_the_loop_over_chunks(loss_type: str) -> None:
    for changes, kinds in variants(loss_type):
        log_probs, entropies, batch = padded_batch(**kinds)
        options = options_for(loss_type, **changes)
        if not is_token_local(batch, options):
            continue
        whole, parts = log_probs.clone().requires_grad_(), log_probs.clone().requires_grad_()
        bonus = entropies.clone().requires_grad_()
        total = policy_objective(whole, entropies, batch, options).total
        loss = token_objective(batch, options, entropy_weight=0.25)
        indices = batch.completions.mask.flatten().nonzero()[:, 0]
        chunks = [
            loss(TokenScores(log_probs=parts.flatten()[chunk], entropy=bonus.flatten()[chunk]), chunk)
            for chunk in indices.flip(0).split(4)
        ]
        assert all(chunk.shape == (4,) for chunk in chunks[:-1])
        in_chunks = torch.cat(chunks).sum() + 0.25 * bonus[batch.completions.mask].sum()
        torch.testing.assert_close(in_chunks, total)
        torch.testing.assert_close(torch.autograd.grad(in_chunks, parts), torch.autograd.grad(total, whole))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_does_not_depend_on_padding_or_on_the_split_into_micro_batches(loss_type: str) -> None:
    options = options_for(loss_type)
    log_probs, entropies, batch = padded_batch()
    loss = loss_of(log_probs, entropies, batch, options)

    def wider(value: Tensor) -> Tensor:
        return torch.nn.functional.pad(value, (2, 3), value=0 if value.dtype == torch.bool else math.nan)

    padded = PolicyBatch(
        Completions(wider(batch.completions.mask)),
        batch.advantages,
        wider(batch.old_log_probs),  # type: ignore[arg-type]
    )
    torch.testing.assert_close(loss_of(wider(log_probs), wider(entropies), padded, options), loss)
    units, total = num_units(batch.completions, options), torch.zeros((), dtype=torch.float64)
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = PolicyBatch(
            Completions(batch.completions.mask[rows]),
            batch.advantages[rows],
            batch.old_log_probs[rows],  # type: ignore[index]
        )
        total = total + policy_objective(log_probs[rows], entropies[rows], part, options).total
    torch.testing.assert_close(total / units, loss)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_batch_without_tokens_has_a_differentiable_loss_of_zero(loss_type: str) -> None:
    log_probs, entropies, batch = padded_batch(ref=loss_type != "rloo")
    batch = batch._replace(completions=Completions(torch.zeros_like(batch.completions.mask)))
    log_probs.requires_grad_()
    for changes in ({}, {} if loss_type == "rloo" else {"top_entropy_quantile": 0.5, "beta": 0.1}):
        result = policy_objective(log_probs, entropies, batch, options_for(loss_type, **changes))
        (gradient,) = torch.autograd.grad(result.total, log_probs)
        # RLOO's ratio of no tokens is 1, a constant.
        assert result.total.isfinite()
        assert loss_type == "rloo" or result.total == 0
        assert not gradient.any()
        assert result.entropy == 0


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_extreme_ratios_give_finite_losses_and_gradients(loss_type: str) -> None:
    for dtype in (torch.float32, torch.float64):
        log_probs, entropies, batch = padded_batch(ref=True, dtype=dtype)
        shifts = torch.tensor([400.0, 0.0, -400.0, 90.0, -90.0, 400.0], dtype=dtype)[:, None]
        batch = batch._replace(old_log_probs=log_probs + shifts, ref_log_probs=log_probs - shifts)
        for advantages in (batch.advantages, torch.zeros_like(batch.advantages)):
            case = batch._replace(advantages=advantages)
            ours = log_probs.clone().requires_grad_()
            options = options_for(loss_type, beta=0.0 if loss_type == "rloo" else 0.1)
            loss = policy_objective(ours, entropies, case, options).total
            (gradient,) = torch.autograd.grad(loss, ours)
            assert loss.isfinite()
            assert gradient.isfinite().all()


def test_bias_corrected_divergence_of_sequences_has_the_gradient_of_both_factors() -> None:
    log_probs, entropies, batch = padded_batch(ref=True)
    assert batch.old_log_probs is not None
    assert batch.ref_log_probs is not None
    options = options_for("luspo", beta=1.0, importance_sampling_level="sequence")
    ours = log_probs.clone().requires_grad_()
    zero = batch._replace(advantages=torch.zeros_like(batch.advantages))
    (gradient,) = torch.autograd.grad(policy_objective(ours, entropies, zero, options).total, ours)
    mask, n = batch.completions.mask, torch.tensor(LENGTHS).double()
    n[3] -= 1
    mean = torch.where(mask, log_probs - batch.old_log_probs, 0).sum(1) / n.clamp(min=1)
    rho = mean.exp()[:, None]
    k = torch.where(mask, kl_estimate(log_probs, batch.ref_log_probs), 0)
    expected = rho * (1 - (batch.ref_log_probs - log_probs).exp()) + rho / n[:, None] * k.sum(1, keepdim=True)
    torch.testing.assert_close(gradient[mask], expected[mask], rtol=1e-11, atol=1e-13)


def test_sampling_ratios_of_tokens_and_of_sequences() -> None:
    log_probs, _, batch = padded_batch(sampled=True)
    assert batch.sampling_log_probs is not None
    batch.sampling_log_probs[0, 1] = torch.nan  # not reported
    mask = batch.completions.mask
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        for low, high in ((None, 1.5), (0.5, None), (0.6, 1.4)):
            ratio = sampling_ratio(
                log_probs,
                batch.sampling_log_probs,
                mode=mode,
                completions=batch.completions,
                clip_min=low,
                clip_max=high,
            )
            for row in range(len(mask)):
                differences = (log_probs - batch.sampling_log_probs)[row][mask[row]].nan_to_num(nan=0.0)
                expected = naive_sampling_ratio(mode, list(differences), low, high)
                if not expected:
                    continue
                found = ratio[row] if ratio.ndim == 1 else ratio[row][mask[row]]
                wanted = expected[0] if ratio.ndim == 1 else torch.stack(expected)
                torch.testing.assert_close(found, wanted)
    of_tokens = sampling_ratio(log_probs, batch.sampling_log_probs, mode="token_mask", clip_min=0.9)
    assert of_tokens[0, 1] == 1


def test_top_entropy_mask_is_the_exact_quantile_of_scored_tokens() -> None:
    _, entropies, batch = padded_batch(dtype=torch.float32)
    mask = batch.completions.mask
    for quantile in (0.05, 0.2, 0.5, 0.99, 1.0):
        threshold = torch.quantile(entropies[mask], 1 - quantile)
        expected = mask & (entropies >= threshold)
        assert torch.equal(top_entropy_mask(entropies, mask, quantile=quantile), expected)
    halves = [(entropies[rows], mask[rows]) for rows in (slice(0, 3), slice(3, 6))]
    gathered: list[Tensor] = []
    for values, part in halves:
        top_entropy_mask(values, part, quantile=0.3, gather=lambda x: gathered.append(x) or x)  # type: ignore[func-returns-value]
    both = torch.cat(gathered)
    found = [top_entropy_mask(values, part, quantile=0.3, gather=lambda _: both) for values, part in halves]
    assert torch.equal(torch.cat(found), top_entropy_mask(entropies, mask, quantile=0.3))
    assert not top_entropy_mask(entropies, torch.zeros_like(mask), quantile=0.3).any()


def test_entropy_mask_selects_what_is_trained_and_what_the_bonus_counts() -> None:
    log_probs, entropies, batch = padded_batch()
    kept = top_entropy_mask(entropies, batch.completions.mask, quantile=0.4)
    options = options_for("dapo", top_entropy_quantile=0.4)
    result = policy_objective(log_probs, entropies, batch, options)
    only = policy_objective(log_probs, entropies, batch._replace(completions=Completions(kept)), options_for("dapo"))
    torch.testing.assert_close(result.total, only.total)
    torch.testing.assert_close(result.entropy, entropies[kept].sum())


def test_number_of_top_entropies_is_known_from_that_of_tokens() -> None:
    entropies = torch.rand(1, 40)
    for quantile in (0.05, 0.2, 0.3, 0.5, 0.8, 1.0):
        for number in (0, 1, 2, 7, 11, 31, 40):
            mask = torch.arange(40)[None] < number
            kept = top_entropy_mask(entropies, mask, quantile=quantile).sum()
            assert num_top_entropies(torch.tensor(number), quantile) == kept, (quantile, number)


def test_kl_estimates() -> None:
    log_probs, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    torch.testing.assert_close(kl_estimate(log_probs, ref), torch.tensor([math.exp(-0.5) - 0.5, math.e - 2]))
    close = torch.tensor([1e-4])  # exp(x) - x - 1 in float32 would be 0 or 1e-7
    torch.testing.assert_close(kl_estimate(-close, torch.zeros(1)), close**2 / 2, rtol=0.05, atol=0)
