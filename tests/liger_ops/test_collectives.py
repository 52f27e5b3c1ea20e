"""Collectives are called by the names that the installed torch does not deprecate."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from liger_ops.collectives import all_gather, reduce_scatter

GROUP: dist.ProcessGroup = SimpleNamespace(size=lambda: 2)  # type: ignore[assignment]


@pytest.mark.parametrize("is_new", [True, False])
def test_collectives_have_the_names_of_the_installed_version(monkeypatch: pytest.MonkeyPatch, is_new: bool) -> None:
    called: list[str] = []

    def gather(output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> None:
        called.append("gather")
        assert tensor.is_contiguous()
        assert group is GROUP
        output.copy_(torch.cat((tensor, tensor + 100)))

    def scatter(output: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> None:
        called.append("scatter")
        assert tensor.is_contiguous()
        assert group is GROUP
        output.copy_(tensor[: len(output)])

    names = ("all_gather_into_tensor", "all_gather_single"), ("reduce_scatter_tensor", "reduce_scatter_single")
    for pair, collective in zip(names, (gather, scatter), strict=True):
        for name in pair:
            monkeypatch.delattr(dist, name, raising=False)
        monkeypatch.setattr(dist, pair[is_new], collective, raising=False)

    table = torch.arange(6).view(3, 2).t()  # not contiguous
    assert torch.equal(all_gather(table, GROUP), torch.stack((table, table + 100)))
    assert all_gather(table[:0], GROUP).shape == (2, 0, 3)
    table = torch.arange(12).view(3, 4).t()
    assert torch.equal(reduce_scatter(table, GROUP), table[:2])
    assert called == ["gather", "gather", "scatter"]


@pytest.mark.filterwarnings("error::FutureWarning")
def test_collectives_do_not_warn(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        assert all_gather(torch.ones(2, 3), group).shape == (1, 2, 3)
        assert reduce_scatter(torch.ones(2, 3), group).shape == (2, 3)
    finally:
        dist.destroy_process_group()
