"""Layer inputs in host memory: on a GPU, where they leave the device at all."""

import pytest
import torch
from torch import Tensor, nn

from lightning_liger.activations.offload import HostMemory, Offloaded
from tests.lightning_liger.activations.programs import controlled

pytestmark = pytest.mark.gpu

SIZE = 1024


def _stack(num_layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.Dropout(0.1)) for _ in range(num_layers)]
    return nn.Sequential(*layers).cuda()


def _train(model: nn.Module, x: Tensor) -> tuple[int, list[Tensor]]:
    """Bytes held after forward, and the gradients."""
    torch.manual_seed(1)
    model.zero_grad()
    y = model(x * 1)
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # the allocator looks then at which copies have ended
    held = torch.cuda.memory_allocated()
    y.square().mean().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return held, gradients


def test_inputs_leave_the_device_and_gradients_are_the_same() -> None:
    model = _stack(6)
    x = torch.randn(SIZE, SIZE, device="cuda", requires_grad=True)
    control = controlled(model, "store")
    held, expected = {}, _train(model, x)[1]
    for mode in ("recompute", "offload", "recompute", "offload"):
        control.modes = [mode] * 6  # type: ignore[list-item]
        held[mode], found = _train(model, x)
        assert all(map(torch.equal, found, expected))
        del found
    layer_input = x.numel() * 4
    assert held["recompute"] - held["offload"] >= 5 * layer_input
    free = control._host_memory(x.device).free
    assert sum(map(len, free.values())) == 6  # the second run took the buffers of the first


def test_memory_is_not_reused_while_it_is_copied() -> None:
    memory = HostMemory(torch.device("cuda"))
    values = [torch.full((2048, 2048), float(index), device="cuda") for index in range(8)]
    offloaded = []
    for value in values:
        offloaded.append(Offloaded(memory, value * 1))
        torch.full((2048, 2048), -1.0, device="cuda")  # may get the memory of what was offloaded
    for index, each in reversed(list(enumerate(offloaded))):
        assert torch.equal(each.get(), values[index])


@pytest.mark.parametrize("view", ["transposed", "sliced", "expanded"])
def test_layouts_survive(view: str) -> None:
    memory = HostMemory(torch.device("cuda"))
    x = torch.randn(64, 64, 128, device="cuda", dtype=torch.bfloat16)
    tensor = {"transposed": x.transpose(0, 1), "sliced": x[:, ::2], "expanded": x[:1].expand(8, -1, -1)}[view]
    back = Offloaded(memory, tensor).get()
    assert torch.equal(back, tensor)
    assert back.requires_grad
    if view == "transposed":
        assert back.stride() == tensor.stride()
