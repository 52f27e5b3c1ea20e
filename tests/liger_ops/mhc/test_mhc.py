"""Hyper-connections: properties of their coefficients, and many streams."""

import math

import pytest
import torch
from torch import Tensor, nn

import liger_ops
from liger_ops.mhc import coefficients, streams
from liger_ops.nn import HyperConnection


def coefficients_of(x: Tensor, **options: float) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    n = x.shape[-2]
    phi, b = torch.randn(math.prod(x.shape[-2:]), n * (n + 2)) / 8, torch.randn(n * (n + 2))
    return liger_ops.mhc_coeffs(x, *(each.to(x.device) for each in (phi, b, *torch.ones(3, 1))), **options)


@pytest.mark.parametrize("num_streams", [1, 2, 3, 4, 7])
def test_matrices_are_doubly_stochastic_and_gates_are_bounded(num_streams: int, device: torch.device) -> None:
    x = torch.randn(5, 6, num_streams, 16, device=device)
    h_pre, h_post, h_res = coefficients_of(x, tmax=60, pre_eps=0.5, post_mult=3.0)
    assert (h_res >= 0).all()
    for dim in (-1, -2):
        torch.testing.assert_close(h_res.sum(dim), torch.ones_like(h_pre), rtol=0, atol=1e-3)
    assert ((h_pre > 0.5) & (h_pre < 1.5)).all()
    assert ((h_post > 0) & (h_post < 3)).all()


def test_scaling_the_streams_changes_no_coefficients(device: torch.device) -> None:
    x = torch.randn(5, 4, 16, device=device)
    for scaled, plain in zip(coefficients_of(1024 * x), coefficients_of(x), strict=True):
        torch.testing.assert_close(scaled, plain, rtol=1e-4, atol=1e-5)


def test_one_hot_coefficients_choose_and_keep_streams(device: torch.device) -> None:
    x, f_out = torch.randn(5, 4, 16, device=device), torch.randn(5, 16, device=device)
    chosen = torch.eye(4, device=device)[torch.tensor([0, 3, 1, 2, 3], device=device)]
    torch.testing.assert_close(liger_ops.mhc_pre(x, chosen), x[chosen.bool()], rtol=0, atol=0)
    y = liger_ops.mhc_post_res(x, f_out, chosen, torch.eye(4, device=device).expand(5, 4, 4))
    torch.testing.assert_close(y, x + chosen[..., None] * f_out[:, None], rtol=0, atol=0)


def test_more_streams_than_registers_hold(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = HyperConnection(nn.Tanh(), 3, 8).to(device), torch.randn(2, 3, 8, device=device)
    expected = module(x)
    monkeypatch.setattr(coefficients, "MAX_STREAMS", 2)
    monkeypatch.setattr(streams, "MAX_STREAMS", 2)
    torch.testing.assert_close(module(x), expected)
