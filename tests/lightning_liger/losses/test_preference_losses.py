"""Preference losses against independent float64 expressions written with probabilities, at the edges too."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_liger.losses import cpo, dpo, kto, orpo, tpo
from lightning_liger.losses.dpo import DPOOptions, PairLogProbs

B = 5
sig = torch.sigmoid
positive = st.floats(0.05, 2.0)


def random_pairs(seed: int = 0, size: int = B, scale: float = 6.0, dtype: torch.dtype = torch.float64) -> PairLogProbs:
    """Of completions of 0 to 9 tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return -(torch.rand(size, generator=generator, dtype=torch.float64) * scale + 0.5).to(dtype)

    own = [draw().requires_grad_(), draw().requires_grad_()]
    numbers = torch.randint(10, (2, size), generator=generator).double()
    return PairLogProbs(*own, *numbers, draw(), draw(), weight=draw().exp(), chosen_nll=None)


def means(pairs: PairLogProbs, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
    return chosen / pairs.num_chosen.clamp(min=1), rejected / pairs.num_rejected.clamp(min=1)


def h_of(kind: str, ratio: Tensor, alpha: float) -> Tensor:
    """f' of the divergence at u = exp(ratio)."""
    u = ratio.exp()
    if kind == "forward_kl":
        return 1 - 1 / u
    if kind == "js_divergence":
        return torch.log(2 * u / (1 + u))
    return (u ** (alpha - 1) - 1) / (alpha - 1) if kind == "alpha_divergence" else torch.log(u)


def expected(p: PairLogProbs, o: DPOOptions, kind: str) -> Tensor:
    rw, rr, b, eps = p.chosen - p.ref_chosen, p.rejected - p.ref_rejected, o.beta, o.label_smoothing
    hw, hr = (h_of(o.f_divergence_type, r, o.f_alpha_divergence_coef) for r in (rw, rr))
    d = b * (hw - hr)
    (mean_w, mean_r), mix = means(p, hw, hr), sig(d / o.discopop_tau)
    mean = mean_w - mean_r

    def smooth(x: Tensor) -> Tensor:
        return -(1 - eps) * torch.log(sig(x)) - eps * torch.log(1 - sig(x))

    def ranked(x: Tensor) -> Tensor:
        return torch.stack(sorted(x.unbind(), key=float))

    return {
        "sigmoid": lambda: torch.log(1 + torch.exp(-d)),
        "hinge": lambda: torch.maximum(1 - d, torch.zeros_like(d)),
        "ipo": lambda: (mean - 1 / (2 * b)) ** 2,
        "exo_pair": lambda: sig(d) * torch.log(sig(d) / (1 - eps)) + sig(-d) * torch.log(sig(-d) / eps),
        "nca_pair": lambda: -torch.log(sig(b * rw)) - torch.log(sig(-b * rw)) / 2 - torch.log(sig(-b * rr)) / 2,
        "robust": lambda: (-(1 - eps) * torch.log(sig(d)) + eps * torch.log(sig(-d))) / (1 - 2 * eps),
        "bco_pair": lambda: -torch.log(sig(b * rw)) - torch.log(sig(-b * rr)),
        "sppo_hard": lambda: (rw - 0.5 / b) ** 2 + (rr + 0.5 / b) ** 2,
        "aot": lambda: smooth(b * (ranked(p.chosen - p.rejected) - ranked(p.ref_chosen - p.ref_rejected))),
        "aot_unpaired": lambda: smooth(b * (ranked(rw) - ranked(rr))),
        "apo_zero": lambda: 1 - sig(b * rw) + sig(b * rr),
        "apo_down": lambda: sig(b * rw) + 1 - sig(b * (rw - rr)),
        "discopop": lambda: (1 - mix) * -torch.log(sig(d)) + torch.exp(-d) * mix,
        "sigmoid_norm": lambda: -torch.log(sig(b * mean)),
    }[kind]()  # fmt: skip


def assert_same_with_gradients(got: Tensor, want: Tensor, inputs: tuple[Tensor, ...], rtol: float = 1e-9) -> None:
    torch.testing.assert_close(got, want, rtol=rtol, atol=1e-10)
    upstream = torch.linspace(0.5, 2, len(got), dtype=got.dtype)
    for own, other in zip(
        torch.autograd.grad(got, inputs, upstream, allow_unused=True, retain_graph=True),
        torch.autograd.grad(want, inputs, upstream, allow_unused=True, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(own, other, rtol=rtol * 10, atol=1e-9)


@pytest.mark.parametrize("kind", [each for each in dpo.LOSS_TYPES if each != "sft"])
@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.data())
def test_dpo_types_and_divergences(kind: str, data: st.DataObject) -> None:
    divergence = data.draw(st.sampled_from(dpo.DIVERGENCES if kind in dpo._OF_DIFFERENCE else ("reverse_kl",)))
    eps = data.draw(st.sampled_from((0.1, 0.3) if kind == "exo_pair" else (0.0, 0.2))) if kind in dpo._SMOOTHED else 0.0
    alpha, beta, tau = data.draw(st.floats(-1.0, 0.9)), data.draw(positive), data.draw(positive)
    options = DPOOptions(
        kind, beta=beta, label_smoothing=eps, f_divergence_type=divergence, f_alpha_divergence_coef=alpha,
        discopop_tau=tau,
    )  # fmt: skip
    pairs = random_pairs(data.draw(st.integers(0, 999)), data.draw(st.integers(1, 6)), scale=2.0)
    got = options.losses(pairs)
    want = expected(pairs, options, kind)
    assert_same_with_gradients(got.losses, want, (pairs.chosen, pairs.rejected), rtol=1e-8)
    assert got.nll is None
    assert not any(value.requires_grad for value in got.metrics.values())


def test_several_losses_are_added_with_their_weights_and_those_of_wpo() -> None:
    pairs = random_pairs()
    options = DPOOptions(("sigmoid", "sft", "apo_zero"), loss_weights=(0.8, 0.3, 2.0), use_weighting=True)
    got = options.losses(pairs)
    want = pairs.weight * (0.8 * expected(pairs, options, "sigmoid") + 2.0 * expected(pairs, options, "apo_zero"))
    assert_same_with_gradients(got.losses, want, (pairs.chosen, pairs.rejected))
    assert_same_with_gradients(got.nll, 0.3 * pairs.weight * -pairs.chosen, (pairs.chosen,))
    (2 * got.nll).sum().backward()  # TRL weights the expanded loss in place, which autograd refuses
    plain = DPOOptions(["sigmoid", "apo_zero"]).losses(pairs)
    torch.testing.assert_close(plain.losses, sum(expected(pairs, options, k) for k in ("sigmoid", "apo_zero")))


def test_a_tie_is_not_accurate() -> None:
    pairs = random_pairs()
    equal = pairs._replace(rejected=pairs.chosen, ref_rejected=pairs.ref_chosen)
    assert DPOOptions().losses(equal).metrics["rewards/accuracies"].sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dpo_losses_are_finite_at_the_edges(dtype: torch.dtype) -> None:
    """Empty completions, and ratios of hundreds of nats, at which exponentials overflow."""
    values = torch.tensor([0.0, -900.0, -1e4, -1e-9, -50.0], dtype=dtype)
    for kind in (each for each in dpo.LOSS_TYPES if each != "sft"):
        for divergence in dpo.DIVERGENCES if kind in dpo._OF_DIFFERENCE else ("reverse_kl",):
            if kind == "discopop":
                continue  # exp(-d) is in its definition
            chosen, rejected = values.clone().requires_grad_(), values.flip(0).requires_grad_()
            numbers = torch.tensor([0.0, 3, 2, 0, 1])
            options = DPOOptions(kind, label_smoothing=0.1 if kind in dpo._SMOOTHED else 0.0,
                                 f_divergence_type=divergence)  # fmt: skip
            ref = torch.tensor([0.0, -100, -9e3, -3, -500], dtype=dtype)
            losses = options.losses(PairLogProbs(chosen, rejected, numbers, numbers, ref, ref)).losses
            losses.sum().backward()
            assert losses.isfinite().all(), (kind, divergence)
            assert chosen.grad.isfinite().all(), (kind, divergence)
            assert rejected.grad.isfinite().all(), (kind, divergence)


def cpo_expected(p: PairLogProbs, o: cpo.CPOOptions) -> Tensor:
    w, r = p.chosen, p.rejected
    if o.loss_type in ("ipo", "simpo", "alphapo"):
        w, r = means(p, w, r)
    if o.alpha:
        w, r = (1 - w.exp() ** -o.alpha) / o.alpha, (1 - r.exp() ** -o.alpha) / o.alpha
    d, b, eps = w - r, o.beta, o.label_smoothing
    if o.loss_type == "hinge":
        return torch.maximum(1 - b * d, torch.zeros_like(d))
    if o.loss_type == "ipo":
        return (d - 1 / (2 * b)) ** 2
    x = b * d - (0 if o.loss_type == "sigmoid" else o.simpo_gamma)
    return -(1 - eps) * torch.log(sig(x)) - eps * torch.log(sig(-x))


@pytest.mark.parametrize("kind", cpo.LOSS_TYPES)
@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    beta=positive, factor=st.sampled_from((0.0, 0.7)), gamma=st.floats(0, 1), alpha=st.floats(-0.3, 0.3),
    eps=st.sampled_from((0.0, 0.1)), seed=st.integers(0, 999),
)  # fmt: skip
def test_cpo_and_tpo_types(
    kind: str, beta: float, factor: float, gamma: float, alpha: float, eps: float, seed: int
) -> None:
    alpha, eps = alpha if abs(alpha) > 0.01 else 0.0, 0.0 if kind in ("hinge", "ipo") else eps
    options, pairs = cpo.CPOOptions(kind, beta, factor, gamma, alpha, eps), random_pairs(seed, scale=2.0)
    got, inputs = options.losses(pairs), (pairs.chosen, pairs.rejected)
    assert_same_with_gradients(got.losses, cpo_expected(pairs, options), inputs)
    assert (got.nll is None) == (kind == "alphapo" or not factor)  # SimPO itself, and AlphaPO, have no such part
    assert got.nll is None or torch.equal(got.nll, -factor * pairs.chosen)
    kind = {"simpo": "tpo-l", "alphapo": "tpo-l"}.get(kind, kind)
    gold = -torch.rand(B, dtype=torch.float64)
    triples = tpo.TPOOptions(kind, beta, factor, gamma, eps).losses(pairs._replace(gold=gold if factor else None))
    assert_same_with_gradients(triples.losses, cpo_expected(pairs, dataclasses.replace(options, alpha=0.0)), inputs)
    assert (triples.nll is None) == (not factor)
    assert triples.nll is None or torch.equal(triples.nll, -factor * gold)


def test_alphapo_of_improbable_completions_is_finite() -> None:
    """exp(log p) underflows from -104 nats in float32, for which TRL gets inf - inf."""
    log_probs = torch.tensor([-200.0, -1000.0, -0.0], requires_grad=True)
    score = cpo.alphapo_score(log_probs, 0.05)
    score.sum().backward()
    torch.testing.assert_close(score.double()[0], (1 - torch.exp(torch.tensor(10.0, dtype=torch.float64))) / 0.05)
    assert score.isfinite().all()
    assert log_probs.grad.isfinite().all()
    assert cpo.alphapo_score(log_probs, 0.0) is log_probs


@settings(derandomize=True, deadline=None, max_examples=30)
@given(positive, st.integers(0, 999))
def test_orpo(beta: float, seed: int) -> None:
    pairs = random_pairs(seed)._replace(chosen_nll=torch.rand(B, dtype=torch.float64))
    got = orpo.ORPOOptions(beta).losses(pairs)
    assert torch.equal(got.nll, pairs.chosen_nll)
    p, q = (x.exp() for x in means(pairs, pairs.chosen, pairs.rejected))
    log_odds = torch.log(p / (1 - p)) - torch.log(q / (1 - q))
    want = -beta * torch.log(sig(log_odds))
    assert_same_with_gradients(got.losses, want, (pairs.chosen, pairs.rejected), rtol=1e-8)
    torch.testing.assert_close(got.metrics["log_odds_chosen"], log_odds.detach())
    torch.testing.assert_close(got.metrics["log_odds_ratio"], torch.log(sig(log_odds)).detach())


def test_log_of_one_minus_an_exponential_is_exact_near_zero_and_far_from_it() -> None:
    x = -torch.logspace(-7, 1.9, 2000)
    truth = torch.log(-torch.expm1(x.double())).where(x > -1, torch.log1p(-torch.exp(x.double())))
    error = ((orpo.log1mexp(x).double() - truth) / truth).abs()
    assert error.max() < torch.finfo(torch.float32).eps  # more if the two forms met elsewhere than at -log 2


def test_orpo_of_certain_completions_is_finite() -> None:
    """log1p(-exp(x)) is -inf where x rounds to 0, and the loss NaN."""
    x = torch.tensor([0.0, -1e-12, -1e-3, -math.log(2), -20.0, -200.0], requires_grad=True)
    value = orpo.log_odds_of(x)
    value.sum().backward()
    assert value.isfinite().all()
    assert x.grad.isfinite().all()
    y = x.detach().double()[2:]
    torch.testing.assert_close(value.detach().double()[2:], y - torch.log(-torch.expm1(y)), rtol=1e-6, atol=1e-7)
    zero = torch.zeros(2, requires_grad=True)
    loss = orpo.ORPOOptions().losses(PairLogProbs(zero, zero * 1, zero + 1, zero + 1)).losses
    loss.sum().backward()
    assert loss.isfinite().all()
    assert zero.grad.isfinite().all()


@pytest.mark.parametrize("kind", kto.LOSS_TYPES)
@settings(derandomize=True, deadline=None, max_examples=20)
@given(beta=positive, good=positive, bad=positive, baseline=st.floats(0, 3), seed=st.integers(0, 999))
def test_kto_types(kind: str, beta: float, good: float, bad: float, baseline: float, seed: int) -> None:
    pairs, labels = random_pairs(seed), torch.rand(B, generator=torch.Generator().manual_seed(seed)) < 0.5
    options, baseline = kto.KTOOptions(kind, beta, good, bad), torch.tensor(baseline)
    got, rewards = kto.kto_loss(pairs.chosen, pairs.ref_chosen, labels, options, baseline=baseline)
    ratio = pairs.chosen - pairs.ref_chosen
    desirable, undesirable = {
        "kto": (1 - sig(beta * (ratio - baseline)), 1 - sig(beta * (baseline - ratio))),
        "apo_zero_unpaired": (1 - sig(beta * ratio), sig(beta * ratio)),
        "bco": (-torch.log(sig(beta * ratio - baseline)), -torch.log(sig(-(beta * ratio - baseline)))),
    }[kind]
    want = torch.where(labels, good * desirable, bad * undesirable)
    assert_same_with_gradients(got, want, (pairs.chosen,), rtol=1e-6)
    torch.testing.assert_close(rewards, beta * ratio.detach())


def test_kl_estimate_has_no_gradient_and_is_not_negative() -> None:
    total = torch.tensor(3.0, requires_grad=True)
    assert not kto.kl_estimate(total, 4).requires_grad
    sums = ((3.0, 4.0), (-3.0, 4.0), (0.0, 0.0))
    assert [kto.kl_estimate(torch.tensor(x), torch.tensor(n)).item() for x, n in sums] == [0.75, 0.0, 0.0]


def test_running_delta_is_the_mean_of_the_means_of_both_kinds() -> None:
    sums, deltas = torch.zeros(2, 2), [0.0]
    for rewards, label in (([1.0, 3.0], True), ([-2.0], False), ([-4.0], False)):
        sums = sums + kto.reward_sums(torch.tensor(rewards), torch.full((len(rewards),), label))
        deltas.append(kto.running_delta(sums).item())
    assert deltas == [0.0, 2.0, 0.0, pytest.approx(0.5 * (2.0 - 3.0))]


def test_defaults_are_those_of_trl() -> None:
    assert DPOOptions() == DPOOptions("sigmoid", None, 0.1, 0.0, "reverse_kl", 0.5, None, False, 0.05)
    assert cpo.CPOOptions() == cpo.CPOOptions("sigmoid", 0.1, 1.0, 0.5, 0.0, 0.0)
    assert orpo.ORPOOptions() == orpo.ORPOOptions(0.1)
    assert kto.KTOOptions() == kto.KTOOptions("kto", 0.1, 1.0, 1.0)
    assert tpo.TPOOptions() == tpo.TPOOptions("sigmoid", 0.01, 1.0, 0.5, 0.0)
