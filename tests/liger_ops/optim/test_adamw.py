"""AdamW: the kernel against float64, and the optimizer against PyTorch's in whole trainings."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from liger_ops.fp8.weights import Float8Shard
from liger_ops.optim import adamw
from liger_ops.optim.adamw import AdamW, _Update
from tests.liger_ops.accuracy import assert_as_accurate, few

OPTIONS = {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
PLAIN = {"maximize": False, "state_dtype": None, "stochastic_rounding": False, "seed": 0}
DTYPES = [torch.float32, torch.bfloat16]


def plain_step(tensors: list[Tensor], step: int, *, maximize: bool = False, **options: Any) -> list[Tensor]:
    """The parameter and both averages after a step, in float32 or wider until each is rounded."""
    dtype = tensors[0].dtype
    param, grad, exp_avg, exp_avg_sq = (tensor.to(torch.promote_types(dtype, torch.float32)) for tensor in tensors)
    grad = -grad if maximize else grad
    (beta1, beta2), lr = options["betas"], options["lr"]
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad.square()
    update = (exp_avg / (1 - beta1**step)) / ((exp_avg_sq / (1 - beta2**step)).sqrt() + options["eps"])
    param = param - lr * options["weight_decay"] * param - lr * update
    return [param.to(dtype), exp_avg.to(dtype), exp_avg_sq.to(dtype)]


def assert_step_is_accurate(tensors: list[Tensor], step: int, **options: Any) -> None:
    """Compares what a step makes of the parameter and both averages."""
    eager = plain_step(tensors, step, **options)
    truth = plain_step([tensor.double() for tensor in tensors], step, **options)
    param, grad, exp_avg, exp_avg_sq = tensors
    number = torch.tensor(float(step), device=param.device)
    grad_before = grad.clone()
    _Update(param, grad, (param, grad, exp_avg, exp_avg_sq), number, PLAIN | options).run()
    torch.testing.assert_close(grad, grad_before, rtol=0, atol=0)
    for name, *results in zip(
        ("param", "exp_avg", "exp_avg_sq"), (param, exp_avg, exp_avg_sq), eager, truth, strict=True
    ):
        assert_as_accurate(name, *results)


def make_tensors(num_elements: int, dtype: torch.dtype, device: torch.device, *, offset: int = 0) -> list[Tensor]:
    """A parameter, a gradient and both averages, which begin ``offset`` elements after what memory is aligned to."""
    param, grad, exp_avg, root = (torch.randn(num_elements + offset, device=device) for _ in range(4))
    return [tensor.to(dtype)[offset:] for tensor in (param, grad, 0.1 * exp_avg, 0.01 * root.square())]


@given(
    dtype=st.sampled_from(DTYPES),
    num_elements=st.sampled_from([1, 1023, 1024, 2500]),
    offset=st.integers(0, 1),
    step=st.sampled_from([1, 2, 7, 1000, 10**6]),
    betas=st.sampled_from([OPTIONS["betas"], OPTIONS["betas"], (0.0, 0.0), (0.999, 0.999999)]),
    changed=st.sampled_from([{}, {"weight_decay": 0.0}, {"lr": 0.0}, {"eps": 1.0}, {"maximize": True}]),
)
@few(60)
def test_step_is_as_accurate_as_pytorch(
    dtype: torch.dtype, num_elements: int, offset: int, step: int, betas: Any, changed: Any, triton_device: torch.device
) -> None:
    tensors = make_tensors(num_elements, dtype, triton_device, offset=offset)
    assert_step_is_accurate(tensors, step, **OPTIONS | {"betas": betas} | changed)


def test_tiny_and_infinite_gradients(triton_device: torch.device) -> None:
    """Denormal averages of squares are not zero, and what is not finite stays where it is."""
    tensors = make_tensors(64, torch.float32, triton_device)
    tensors[1].fill_(1e-20)
    tensors[2].fill_(1e-20)
    tensors[3].fill_(1e-40)
    assert_step_is_accurate(tensors, 10, **OPTIONS | {"eps": 0.0})
    param, grad, exp_avg, exp_avg_sq = make_tensors(64, torch.float32, triton_device)
    grad[7], grad[9] = float("nan"), float("inf")
    step = torch.tensor(3.0, device=triton_device)
    _Update(param, grad, (param, grad, exp_avg, exp_avg_sq), step, OPTIONS | PLAIN).run()
    assert param.isfinite().logical_not().nonzero().flatten().tolist() == [7, 9]


def note_updates(monkeypatch: pytest.MonkeyPatch, updated: list[Tensor]) -> None:
    run = _Update.run

    def noting(self: _Update) -> None:
        updated.append(self.tensors[0])
        run(self)

    monkeypatch.setattr(_Update, "run", noting)


@pytest.fixture
def updated_parameters(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Lets kernels update tensors of 16 elements or more; the parameters that they update, as long as that goes on."""
    updated: list[Tensor] = []

    monkeypatch.setattr(adamw, "_MIN_ELEMENTS", 16)
    note_updates(monkeypatch, updated)
    return updated


SHAPES = [(4, 8), (5,), (33,), (3,), (2, 3, 7)]


def make_parameters(device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in SHAPES]


def fill_gradients(parameters: list[Tensor], step: int) -> None:
    """The gradients of a step, the same for each call; the last parameter has none in odd steps."""
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
    if step % 2:
        parameters[-1].grad = None


def assert_same(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    """Compares parameters and states, to a few roundings of the dtype."""
    for group, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        for parameter, wanted in zip(group["params"], other["params"], strict=True):
            tolerance = {"rtol": 20 * torch.finfo(parameter.dtype).eps, "atol": 4 * torch.finfo(parameter.dtype).eps}
            torch.testing.assert_close(parameter, wanted, **tolerance)
            assert ours.state[parameter].keys() == theirs.state[wanted].keys()
            for name, state in ours.state[parameter].items():
                other_state = theirs.state[wanted][name].to(state)  # an average, or a count that may be on the CPU
                torch.testing.assert_close(state, other_state, **tolerance)


Change = Callable[[Any, list[Tensor], int], None]
"""Called with an optimizer, its parameters and the step that it will make."""


def _set(at: int = 0, **options: Any) -> Change:
    def change(optimizer: Any, parameters: list[Tensor], step: int) -> None:
        if step == at:
            optimizer.param_groups[0].update(options)

    return change


def _in_groups(optimizer: Any, parameters: list[Tensor], step: int) -> None:
    if step == 0:
        group, *_ = optimizer.param_groups
        optimizer.param_groups.append({**group, "params": group["params"][2:], "lr": 0.01, "maximize": True})
        group.update(params=group["params"][:2], weight_decay=0.5)
    for group in optimizer.param_groups:
        group["lr"] *= 0.7


def _count_on_the_cpu(optimizer: Any, parameters: list[Tensor], step: int) -> None:
    """As an optimizer that is not fused."""
    optimizer.param_groups[0].update(fused=None, foreach=False)  # the only one that takes such counts on a GPU
    for state in optimizer.state.values() if step == 1 else ():
        state["step"] = state["step"].cpu().double()


def _scale(optimizer: Any, parameters: list[Tensor], step: int) -> None:
    optimizer.grad_scale = torch.tensor(2.0, device=parameters[0].device)
    optimizer.found_inf = torch.tensor(float(step == 2), device=parameters[0].device)


def _negate(optimizer: Any, parameters: list[Tensor], step: int) -> None:
    optimizer.param_groups[0].update(fused=None, foreach=False)  # the only one that takes them on a GPU
    for parameter in parameters:
        parameter.grad = None if parameter.grad is None else torch._neg_view(parameter.grad)


def _transpose(optimizer: Any, parameters: list[Tensor], step: int) -> None:
    for parameter in parameters:
        parameter.data = parameter.data.mT.contiguous().mT if parameter.dim() > 1 else parameter.data
        parameter.grad = torch.full_like(parameter, 1.0 + step) if parameter.dim() > 1 else None


TENSORS = {"foreach": False, "fused": None}  # the only one that takes betas that are tensors


@pytest.mark.parametrize(
    ("change", "dtype", "num_updates"),
    [
        # The states come from PyTorch's first step; the last parameter has no gradient in two of the others.
        pytest.param(_set(), torch.float32, 3 + 3 + 1, id="float32"),
        pytest.param(_set(), torch.bfloat16, 3 + 3 + 1, id="bfloat16"),
        pytest.param(_in_groups, torch.float32, 3 + 3 + 1, id="groups"),
        pytest.param(_count_on_the_cpu, torch.float32, 3 + 3 + 1, id="steps counted on the CPU"),
        pytest.param(_set(2, lr=np.float32(0.01), weight_decay=np.float64(0.3)), torch.float32, 7, id="NumPy's"),
        pytest.param(_set(2, betas=(np.float32(0.5), np.float32(0.75))), torch.float32, 7, id="NumPy's betas"),
        pytest.param(_set(2, weight_decay=1, lr=0), torch.float32, 7, id="integers"),
        pytest.param(_set(2, foreach=False, fused=None), torch.float32, 7, id="foreach"),
        # One step before the change.
        pytest.param(_set(2, betas=(torch.tensor(0.5), torch.tensor(0.75)), **TENSORS), torch.float32, 2, id="betas"),
        pytest.param(_set(2, decoupled_weight_decay=False), torch.float32, 2, id="decay of the gradient"),
        pytest.param(_scale, torch.float32, 0, id="scale"),
        pytest.param(_set(lr=torch.tensor(0.03)), torch.float32, 0, id="tensor lr"),
        pytest.param(_set(amsgrad=True), torch.float32, 0, id="amsgrad"),
        pytest.param(_set(), torch.float64, 0, id="float64"),
        pytest.param(_negate, torch.float32, 0, id="negative views"),
        pytest.param(_transpose, torch.float32, 0, id="transposed"),
    ],
)
def test_trains_as_pytorch(
    triton_device: torch.device, updated_parameters: list[Tensor], change: Change, dtype: torch.dtype, num_updates: int
) -> None:
    optimizers = []
    for kind in (AdamW, torch.optim.AdamW):
        parameters = make_parameters(triton_device, dtype)
        optimizer = kind(parameters, **OPTIONS)
        optimizer.param_groups[0]["fused"] = True
        for step in range(4):
            fill_gradients(parameters, step)
            change(optimizer, parameters, step)
            gradients = [parameter.grad for parameter in parameters]
            optimizer.step()
            assert all(parameter.grad is grad for parameter, grad in zip(parameters, gradients, strict=True))
        optimizers.append(optimizer)
    assert len(updated_parameters) == num_updates
    assert_same(*optimizers)


def test_each_loads_the_others_states(triton_device: torch.device, updated_parameters: list[Tensor]) -> None:
    pairs = []
    theirs = partial(torch.optim.AdamW, fused=triton_device.type == "cuda")
    for first, second in ((AdamW, theirs), (theirs, AdamW)):
        parameters = make_parameters(triton_device)
        optimizer = first(parameters, **OPTIONS)
        for step in range(4):
            if step == 2:
                state, optimizer = optimizer.state_dict(), second(parameters, **OPTIONS)
                optimizer.load_state_dict(state)
            fill_gradients(parameters, step)
            optimizer.step()
        pairs.append(optimizer)
    assert updated_parameters
    assert_same(*pairs)


def test_closure_and_hooks_run_once(triton_device: torch.device, updated_parameters: list[Tensor]) -> None:
    parameters = make_parameters(triton_device)
    torch.optim.AdamW(parameters)  # PyTorch wraps the steps of classes that were instantiated
    optimizer, calls = AdamW(parameters, **OPTIONS), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> Tensor:
        calls.append("closure")
        optimizer.zero_grad()
        loss = sum(parameter.square().sum() for parameter in parameters)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    assert calls == ["before", "closure", "after"] * 3
    assert updated_parameters


def test_many_small_decays_add_up(triton_device: torch.device, updated_parameters: list[Tensor]) -> None:
    # lr * weight_decay is below the last digit of 1 in float32.
    options = {"lr": 1e-6, "weight_decay": 0.01, "eps": 1e-8}
    generator = torch.Generator().manual_seed(5)
    values = 4 * torch.rand(2048, generator=generator)
    weights = [values.clone().to(triton_device, each).requires_grad_() for each in (torch.float32, torch.float64)]
    optimizers = [AdamW([weight], **options) for weight in weights]
    for _ in range(400):
        gradient = torch.randn(2048, generator=generator)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = gradient.to(weight)
            optimizer.step()
    assert len(updated_parameters) == 399
    decay = 400 * options["lr"] * options["weight_decay"] * values.mean().item()
    error = (weights[0].detach().double() - weights[1].detach()).mean().item()
    assert abs(error) < 0.1 * decay


def test_what_is_fused_is_decided_for_each_group() -> None:
    weight = torch.zeros(3, requires_grad=True)
    optimizer = AdamW([{"params": []}])
    optimizer.add_param_group({"params": [weight, torch.zeros(2, dtype=torch.complex64, requires_grad=True)]})
    assert [group["fused"] for group in optimizer.param_groups] == [None, None]
    for parameter in optimizer.param_groups[1]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not hasattr(optimizer, "_step_supports_amp_scaling")  # so that gradients can be clipped in 16-mixed


@pytest.mark.gpu
def test_groups_on_a_gpu_are_fused_unless_they_say_otherwise() -> None:
    weights = [torch.zeros(3, device="cuda", requires_grad=True) for _ in range(3)]
    optimizer = AdamW([{"params": weights[:1]}, {"params": weights[1:2], "foreach": True}])
    optimizer.add_param_group({"params": [weights[2], torch.zeros(2, requires_grad=True)]})
    assert [group["fused"] for group in optimizer.param_groups] == [True, None, None]


def test_graphs_that_saved_a_parameter_are_out_of_date(
    triton_device: torch.device, updated_parameters: list[Tensor]
) -> None:
    weight = torch.randn(32, device=triton_device, requires_grad=True)
    optimizer = AdamW([weight], **OPTIONS)
    for _ in range(2):
        loss = weight.exp().square().sum() * weight.square().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
    assert updated_parameters
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_failing_step_leaves_gradients(triton_device: torch.device, updated_parameters: list[Tensor]) -> None:
    parameters = make_parameters(triton_device)
    optimizer = AdamW(parameters, **OPTIONS)
    fill_gradients(parameters, 0)
    optimizer.step()
    before = parameters[0].clone()
    parameters[1].grad = torch.randn_like(parameters[1]).to_sparse()
    with pytest.raises(RuntimeError, match="sparse gradients"):
        optimizer.step()
    assert all(parameter.grad is not None for parameter in parameters)
    assert torch.equal(parameters[0], before)


@pytest.fixture
def mesh(tmp_path: Path, triton_device: torch.device) -> DeviceMesh:
    """Of one process, in two dimensions."""
    backend = {"cuda": "nccl"}.get(triton_device.type, "gloo")
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    return init_device_mesh(triton_device.type, (1, 1))


@pytest.mark.parametrize("kind", [Tensor.detach, Float8Shard])
def test_shards_of_dtensors(
    mesh: DeviceMesh, triton_device: torch.device, updated_parameters: list[Tensor], kind: Callable[[Tensor], Tensor]
) -> None:
    def shard(tensor: Tensor, kind: Callable[[Tensor], Tensor] = Tensor.detach) -> DTensor:
        return DTensor.from_local(kind(tensor.detach().clone()), mesh, [Shard(0), Replicate()], run_check=False)

    theirs = make_parameters(triton_device)
    ours = [torch.nn.Parameter(shard(parameter, kind)) for parameter in theirs]
    optimizer, plain = AdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    for step in range(4):
        fill_gradients(theirs, step)
        for parameter, other in zip(ours, theirs, strict=True):
            parameter.grad = None if other.grad is None else shard(other.grad)
        optimizer.step()
        plain.step()
    assert len(updated_parameters) == 3 + 3 + 1
    for parameter, other in zip(ours, theirs, strict=True):
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.to_local(), other)


@pytest.mark.parametrize(
    ("weight_placements", "grad_placements"),
    [
        ([Replicate(), Replicate()], [Partial(), Replicate()]),
        ([Shard(0), Shard(1)], [Shard(1), Shard(0)]),
    ],
)
def test_dtensors_that_are_spread_in_other_ways_are_left_to_pytorch(
    mesh: DeviceMesh, updated_parameters: list[Tensor], weight_placements: Any, grad_placements: Any
) -> None:
    weight = torch.nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, weight_placements))
    optimizer = AdamW([weight], **OPTIONS)
    for _ in range(3):
        weight.grad = DTensor.from_local(torch.randn(8, 8, device=weight.device), mesh, grad_placements)
        optimizer.step()
    assert not updated_parameters


@pytest.mark.gpu
def test_large_parameters_of_a_gpu_take_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its real bound, under a GradScaler too, against PyTorch's fused kernel."""
    updated: list[Tensor] = []

    def make() -> list[Tensor]:
        generator = torch.Generator("cuda").manual_seed(3)
        shapes = [(2**23 - 1,), (2**23 + 3,), (3, 2**22)]
        return [torch.randn(shape, device="cuda", generator=generator).requires_grad_() for shape in shapes]

    note_updates(monkeypatch, updated)
    ours, theirs = make(), make()
    optimizer, plain = AdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS, fused=True)
    scalers = [torch.amp.GradScaler("cuda", init_scale=4.0) for _ in range(2)]
    for step in range(5):
        for parameters, each, scaler in zip((ours, theirs), (optimizer, plain), scalers, strict=True):
            generator = torch.Generator("cuda").manual_seed(step)
            scale = 4.0 if step == 3 else 1.0
            for parameter in parameters:
                parameter.grad = scale * torch.randn(parameter.shape, device="cuda", generator=generator)
            if step == 3:
                scaler.scale(torch.ones((), device="cuda"))
                scaler.step(each)
            else:
                each.step()
    assert [each.numel() for each in updated] == [2**23 + 3, 3 * 2**22] * 4
    assert_same(optimizer, plain)
