"""Hyper-connections of many streams; sizes and options are in test_sizes."""

import pytest
import torch
from torch import nn

from liger_ops.mhc import coefficients, streams
from liger_ops.nn import HyperConnection


def test_more_streams_than_registers_hold(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = HyperConnection(nn.Tanh(), 3, 8).to(device), torch.randn(2, 3, 8, device=device)
    expected = module(x)
    monkeypatch.setattr(coefficients, "MAX_STREAMS", 2)
    monkeypatch.setattr(streams, "MAX_STREAMS", 2)
    torch.testing.assert_close(module(x), expected)
