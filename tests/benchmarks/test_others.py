"""What the benchmarks use of liger-kernel exists in the installed version."""

import re
from pathlib import Path

import pytest
from torch import nn

from benchmarks.losses import others
from benchmarks.training import medusa_heads, worker
from tests.lightning_liger.tiny import tiny_llama


@pytest.fixture(autouse=True)
def _installed() -> None:
    pytest.importorskip("liger_kernel")


def test_losses_are_there() -> None:
    source = Path(others.__file__).read_text(encoding="utf-8")
    names = re.findall(r"_liger_kernel\(\"(\w+)\"\)", source)
    assert len(names) == 4
    for name in names:
        assert issubclass(others._liger_kernel(name), nn.Module)


def test_models_are_patched() -> None:
    model = tiny_llama()
    before = type(model.model.norm).forward
    worker.apply_liger_kernel(model)
    assert model.model.norm.forward.__func__ is not before


def test_loss_of_heads_is_there() -> None:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    assert issubclass(LigerFusedLinearCrossEntropyLoss, nn.Module)
    assert medusa_heads.HEAD_LOSSES["liger_kernel"] is medusa_heads._liger_kernel
