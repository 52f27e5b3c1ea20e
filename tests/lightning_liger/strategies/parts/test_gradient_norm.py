"""Over which ranks parts of DTensors are added up; the norms themselves are tested with several processes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_liger.strategies.parts.gradient_norm import clip_gradient_norm, gradient_norm


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of two dimensions, as of FSDP2 with tensor parallelism, and one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", torch.zeros(1, 1, dtype=torch.int64), mesh_dim_names=("data", "tensor"))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("placements", "num_sums"),
    [
        ((Replicate(), Replicate()), 0),
        ((Shard(0), Replicate()), 1),
        ((Shard(0), Shard(1)), 2),
        ((_StridedShard(0, split_factor=1), Shard(0)), 2),  # no Shard since torch 2.13
        ((Shard(0), Partial()), 1),  # added up by itself
    ],
    ids=str,
)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_parts_are_added_up_over_all_ranks_that_have_some(
    placements: Any, num_sums: int, norm_type: float, mesh: DeviceMesh, monkeypatch: Any
) -> None:
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(3, 4), mesh, [Shard(0), Replicate()], run_check=False))
    local = torch.randn(3, 4)
    parameter.grad = DTensor.from_local(local.clone(), mesh, placements, run_check=False)
    sums: list[Any] = []
    add = dist.all_reduce
    monkeypatch.setattr(
        dist, "all_reduce", lambda *args, **kwargs: sums.append(kwargs["group"]) or add(*args, **kwargs)
    )
    want = float(local.double().norm(norm_type))
    found = gradient_norm(nn.Module(), [parameter], torch.device("cpu"), norm_type)
    assert float(found) == pytest.approx(want, rel=1e-6)
    assert len(sums) == num_sums
    assert float(clip_gradient_norm(nn.Module(), [parameter], want / 2, norm_type)) == pytest.approx(want, rel=1e-6)
    gradient: Any = parameter.grad
    torch.testing.assert_close(gradient.full_tensor(), local / 2, rtol=1e-4, atol=1e-6)
