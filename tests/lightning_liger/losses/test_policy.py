"""Policy-gradient losses and their gradients against loops over tokens in float64, and what they must not depend on."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from liger_ops import TokenScores
from lightning_liger.losses.completions import Completions
from lightning_liger.losses.policy import kl_estimate, num_items, num_top_entropies, top_entropy_mask
from lightning_liger.losses.policy_batch import (
    PolicyBatch,
    check_policy_batch,
    is_token_local,
    policy_objective,
    token_objective,
)
from lightning_liger.losses.policy_options import CLIPPED, LOSS_TYPES, SAMPLING_MODES, PolicyOptions
from tests.lightning_liger.losses.policy_batches import (
    naive_loss,
    options_for,
    packed_batch,
    padded_batch,
)

MODES = st.sampled_from(SAMPLING_MODES)


def loss_of(log_probs: Tensor, entropies: Tensor, batch: PolicyBatch, options: PolicyOptions) -> Tensor:
    check_policy_batch(batch, options)
    return policy_objective(log_probs, entropies, batch, options).total / num_items(batch.completions, options)


@st.composite
def programs(draw: st.DrawFn, loss_type: str) -> tuple[PolicyOptions, dict[str, Any]]:
    """Legal options of a loss, with what the batch needs for them."""
    flag = st.booleans()
    kinds = {"old": draw(flag), "sampled": draw(flag), "seed": draw(st.integers(0, 99))}
    mode = draw(
        MODES.filter(lambda mode: ("sequence" in mode) == (loss_type == "rloo") or loss_type not in ("rloo", "vespo"))
    )
    changes: dict[str, Any] = {"vllm_importance_sampling_mode": mode}
    bounds = draw(st.sampled_from(((None, 3.0), (0.5, 1.2), (0.6, None))))
    names = ("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max")
    changes |= dict(zip(names, bounds, strict=True))
    if loss_type == "rloo":
        return options_for(loss_type, **changes), kinds
    kinds |= {"ref": draw(flag), "per_token": draw(flag)}
    changes |= {"beta": 0.3 if kinds["ref"] else 0.0, "use_bias_correction_kl": draw(flag)}
    changes["off_policy_mask_threshold"] = draw(st.sampled_from((None, 0.02, 0.05)))
    if loss_type != "vespo":
        changes["importance_sampling_level"] = draw(st.sampled_from(("token", "sequence")))
    if loss_type in CLIPPED:
        changes["delta"] = draw(st.sampled_from((None, 1.2)))
    return options_for(loss_type, **changes), kinds


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@settings(derandomize=True, deadline=None, max_examples=30)
@given(data=st.data())
def test_losses_and_gradients_equal_the_published_formulas_in_every_form(loss_type: str, data: st.DataObject) -> None:
    """Padded, packed, in micro-batches, and token by token in chunks where a token is enough."""
    options, kinds = data.draw(programs(loss_type))
    log_probs, entropies, batch = padded_batch(**kinds)
    if batch.sampling_log_probs is not None:
        batch.sampling_log_probs[0, 1] = torch.nan  # not reported
    leaf = log_probs.clone().requires_grad_()
    expected = naive_loss(leaf, batch, options)
    (expected_gradient,) = torch.autograd.grad(expected, leaf)
    items, mask = num_items(batch.completions, options), batch.completions.mask

    def in_micro_batches(log_probs: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
            columns = (None if each is None else each[rows] for each in batch[1:])
            part = PolicyBatch(Completions(mask[rows]), *columns)  # type: ignore[arg-type]
            total = total + policy_objective(log_probs[rows], entropies[rows], part, options).total
        return total / items

    def in_chunks(log_probs: Tensor) -> Tensor:
        loss, flat = token_objective(batch, options, entropy_weight=0.25), log_probs.flatten()
        chunks = mask.flatten().nonzero()[:, 0].flip(0).split(4)
        found = [loss(TokenScores(log_probs=flat[each], entropy=entropies.flatten()[each]), each) for each in chunks]
        return (torch.cat(found).sum() + 0.25 * entropies[mask].sum()) / items

    forms: dict[str, Any] = {
        "padded": lambda x: loss_of(x, entropies, batch, options),
        "packed": lambda x: loss_of(*packed_batch(x, entropies, batch), options),
        "micro-batches": in_micro_batches,
    }
    if is_token_local(batch, options):
        forms["chunks"] = in_chunks
    for name, form in forms.items():
        ours = log_probs.clone().requires_grad_()
        loss = form(ours)
        (gradient,) = torch.autograd.grad(loss, ours)
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(
            gradient, expected_gradient, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert not gradient[~mask].any()


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
