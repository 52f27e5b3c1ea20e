"""Moments in 16 and 8 bits: codes and roundings by themselves, the kernel against PyTorch, and whole trainings."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from liger_ops import backend
from liger_ops.optim import AdamW, moments
from tests.liger_ops.accuracy import few

BOTH = {"exp_avg": True, "exp_avg_sq": False}
"""Whether a moment has a sign."""
STATE_DTYPES = [None, torch.float32, torch.bfloat16, "8bit"]


def words_of(shape: tuple[int, ...], step: int = 1, number: int = 0, **options: Any) -> Tensor:
    arguments = {"is_padded": False, "seed": 0, "step": torch.tensor(float(step)), "number": number}
    return moments.random_words(torch.Size(shape), **arguments | options)


def test_random_words_are_those_of_philox_and_differ_in_all_that_counts() -> None:
    published = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # of counter and key 0, in Random123's tests
    assert words_of((5,), step=0)[:4].tolist() == published
    others = [{}, {"step": 2}, {"number": 1}, {"seed": 1}, {"seed": 2**32}]
    drawn = torch.stack([words_of((4099,), **each) for each in others])
    assert drawn.unique().numel() > 0.999 * drawn.numel()
    padded = words_of((3, 300), is_padded=True)
    torch.testing.assert_close(padded, words_of((3, 512))[:, :300], rtol=0, atol=0)


def draws(num_elements: int, num_draws: int) -> list[Tensor]:
    """Words of the parameter and both moments, ``[draws, elements]``."""
    words = torch.stack([words_of((num_elements,), step) for step in range(1, num_draws + 1)])
    return [words, *(words * factor & moments.WORD for factor in moments.FACTORS)]


def test_stochastic_rounding_has_no_bias() -> None:
    num_draws, generator = 1000, torch.Generator().manual_seed(2)
    first = torch.randn(128, generator=generator) * torch.rand(128, generator=generator) ** 3
    ways = draws(128, num_draws)
    fractions = torch.stack([(way >> 12).double().flatten() for way in ways])
    assert (torch.corrcoef(fractions) - torch.eye(3)).abs().max() < 0.01
    for x, words, is_signed in zip((first, first, first.square()), ways, (None, True, False), strict=True):
        rows = x.expand_as(words)
        rounded = [moments.cut(rows, words)]
        if is_signed is not None:
            rounded.append(moments.decode(*moments.encode(rows, is_signed, words), is_signed))
        for values in rounded:
            low, high = values.amin(0), values.amax(0)
            assert torch.all((values == low) | (values == high))  # neighbours only
            moving = high > low
            assert moving.sum() > 100
            bound = (high - low).double() / 2 / num_draws**0.5  # of the standard deviation of the mean
            deviations = ((values.double().mean(0) - x.double()) / bound)[moving]
            assert deviations.abs().max() < 5
            assert deviations.mean().abs() < 4 / moving.sum() ** 0.5


@given(
    shape=st.sampled_from([(1, 256), (3, 300), (2, 5, 513), (0, 300)]),
    scale=st.sampled_from([1.0, 1e-30, 1e-38, 1e30]),
    spread=st.integers(1, 24),
    seed=st.integers(0, 100),
)
@few(40)
def test_codes_are_within_an_eighth(shape: tuple[int, ...], scale: float, spread: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) ** spread * scale
    x.masked_fill_(torch.rand(shape, generator=generator) < 0.1, 0.0)
    for is_signed in BOTH.values():
        numbers = x if is_signed else x.abs()
        codes, scales = moments.encode(numbers, is_signed)
        assert codes.shape == shape
        assert scales.shape == (*shape[:-1], -(-shape[-1] // 256))
        decoded = moments.decode(codes, scales, is_signed)
        start = 1.125 * 2.0 ** (-16 if is_signed else -32)
        largest = torch.stack([each.abs().amax(-1) for each in numbers.split(256, -1)], -1)
        assert torch.equal(scales, largest)
        each = largest.double().repeat_interleave(256, -1)[..., : shape[-1]]
        tiny = 2.0**-149  # float32's own steps
        error = (decoded.double() - numbers.double()).abs()
        steps = 1.0 if is_signed else 2.0  # a second moment that is nearly 0 keeps the first code
        assert torch.all(error <= steps / 16 * (1 + 1e-5) * (numbers.double().abs() + start * each) + tiny)
        assert torch.all(decoded[numbers == 0] == 0)
        if not is_signed and scale > 1e-38:
            assert torch.all(decoded[numbers > 0] > 0)
        if scale > 1e-38:
            again = moments.encode(decoded, is_signed)
            assert torch.equal(again[0], codes)
            assert torch.equal(again[1], scales)
        stochastic, _ = moments.encode(numbers, is_signed, words_of(shape))
        error = (moments.decode(stochastic, scales, is_signed).double() - numbers.double()).abs()
        assert torch.all(error <= 1 / 8 * (1 + 1e-5) * (numbers.double().abs() + start * each) + tiny)


def test_blocks_with_what_is_not_finite_are_nan() -> None:
    for value in (float("nan"), float("inf")):
        x = torch.ones(2, 512)
        x[1, 300] = value
        decoded = moments.decode(*moments.encode(x, False), False)
        assert decoded.isnan().sum() == 256
        assert decoded[1, 256:].isnan().all()
        assert moments.cut(x, words_of((2, 512)))[1, 300].isfinite().logical_not()
    bits = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # NaN as GPUs make it
    assert moments.cut(bits, torch.tensor([moments.WORD])).isnan()


def trained(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, num_steps: int = 2, **options: Any
) -> tuple[Tensor, dict[str, Any], AdamW]:
    """A parameter that is the second of an optimizer, its states, and the optimizer."""
    generator = torch.Generator().manual_seed(1)
    numbers = [torch.randn(shape, generator=generator) for _ in range(num_steps + 1)]
    parameter = torch.nn.Parameter(numbers[0].to(device, dtype))
    optimizer = AdamW([torch.nn.Parameter(torch.zeros(2, device=device)), parameter], lr=0.01, **options)
    for step in numbers[1:]:
        parameter.grad = (step * torch.rand(shape, generator=generator) ** 6).to(device, dtype)
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter], optimizer


@pytest.mark.parametrize("shape", [(15, 300), (2, 7, 512), (70,), ()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES[1:], ids=str)
def test_kernel_makes_what_the_reference_makes(
    triton_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    state_dtype: Any,
) -> None:
    options = {"state_dtype": state_dtype, "stochastic_rounding": True, "seed": 2**40 + 7}
    parameter, state, _ = trained(shape, dtype, triton_device, **options)
    monkeypatch.setattr(backend, "use_triton", lambda tensor: False)
    expected, expected_state, _ = trained(shape, dtype, triton_device, **options)
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7}
    # On GPUs, products and sums are rounded at once: float32 differs, and a number may cross a random threshold.
    on_gpu = triton_device.type == "cuda"
    torch.testing.assert_close(parameter, expected, rtol=rounding[dtype], atol=1e-6)
    assert state.keys() == expected_state.keys()
    assert ("exp_avg_codes" in state) == (state_dtype == "8bit" and len(shape) > 1)
    for name, value in state.items():
        rarely = 0 if not on_gpu else value.numel() if value.dtype == torch.float32 else max(1, value.numel() // 100)
        assert (value != expected_state[name]).sum() <= rarely, name
        if value.dtype == torch.uint8:
            assert (value.int() - expected_state[name].int()).abs().max() <= 1
        else:
            torch.testing.assert_close(value, expected_state[name], rtol=rounding.get(value.dtype, 0), atol=1e-6)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES[1:], ids=str)
def test_step_from_stored_moments_is_that_of_adamw(device: torch.device, state_dtype: Any) -> None:
    options = {"betas": (0.8, 0.9), "weight_decay": 0.3, "eps": 1e-6, "maximize": True}
    parameter, state, optimizer = trained((9, 600), torch.float32, device, state_dtype=state_dtype, **options)
    wide = torch.nn.Parameter(parameter.double())
    plain = torch.optim.AdamW([wide], lr=0.01, **options)
    plain.state[wide] = {"step": state["step"].cpu().clone()}
    plain.state[wide] |= {name: moments.read(state, name).double() for name in BOTH}
    last = optimizer.param_groups[0]["params"][1]
    wide.grad = last.grad.double()
    optimizer.step()
    plain.step()
    torch.testing.assert_close(last.double(), wide, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("saved", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("loaded", STATE_DTYPES, ids=str)
def test_states_resume_bit_for_bit_and_are_converted(tmp_path: Path, saved: Any, loaded: Any) -> None:
    def make(values: Tensor, state_dtype: Any, seed: int) -> AdamW:
        parameters = [torch.nn.Parameter(each.clone()) for each in (values, values[:4, :2].bfloat16())]
        return AdamW(parameters, lr=0.01, state_dtype=state_dtype, stochastic_rounding=True, seed=seed)

    def train(optimizer: AdamW, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in 2 * optimizer.param_groups[0]["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        optimizer.step()

    first = make(torch.ones(17, 300), saved, seed=5)
    for step in range(3):
        train(first, step)
    torch.save(first.state_dict(), tmp_path / "states.pt")
    second = make(torch.zeros(17, 300), loaded, seed=6)
    train(second, 0)
    second.load_state_dict(torch.load(tmp_path / "states.pt", weights_only=True))
    assert second.param_groups[0]["seed"] == 5
    assert second.param_groups[0]["state_dtype"] == (
        loaded if loaded in (None, "8bit") else str(loaded).removeprefix("torch.")
    )
    pairs = list(zip(first.param_groups[0]["params"], second.param_groups[0]["params"], strict=True))
    for old, new in pairs:
        new.data = old.data.clone()
        codes, float32 = (
            second.state[new].keys() - {"step"},
            moments.dtype_of(new, second.param_groups[0]["state_dtype"]),
        )
        assert any("codes" in name for name in codes) == (float32 == torch.uint8)
        for name in BOTH:
            before, after = (
                moments.read(*each).float() for each in ((first.state[old], name), (second.state[new], name))
            )
            largest = before.abs().max().item()
            torch.testing.assert_close(after, before, rtol=1 / 15, atol=2e-6 * largest)
    for optimizer in (first, second):
        train(optimizer, 9)
    for old, new in pairs:
        torch.testing.assert_close(new, old, rtol=0.02, atol=0.01)
        if saved == loaded:
            assert torch.equal(new, old)
            for name, value in first.state[old].items():
                assert torch.equal(second.state[new][name], value)


def regression_loss(state_dtype: Any) -> float:
    """The loss of a regression whose first gradients are 100 times as large as they would be."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 32, generator=generator)
    outputs = inputs @ torch.randn(32, 4, generator=generator)
    weight = torch.nn.Parameter(torch.zeros(4, 32))
    optimizer = AdamW([weight], lr=0.3, betas=(0.9, 0.999), weight_decay=0.0, state_dtype=state_dtype)
    for step in range(400):
        optimizer.zero_grad()
        loss = (inputs @ weight.T - outputs).square().mean()
        (loss * (100.0 if step < 3 else 1.0)).backward()
        optimizer.step()
    return loss.item()


def test_moments_in_bfloat16_train_as_float32_but_not_if_rounded_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = regression_loss(None)
    assert regression_loss(torch.bfloat16) == pytest.approx(expected, rel=0.03)
    monkeypatch.setattr(moments, "cut", lambda x, words: x.bfloat16())
    assert regression_loss(torch.bfloat16) > 1.2 * expected


def test_steps_below_a_digit_add_up_in_bfloat16_weights() -> None:
    ends = {}
    for is_stochastic in (False, True):
        weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        optimizer = AdamW([weight], lr=1e-4, weight_decay=0.0, stochastic_rounding=is_stochastic)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        ends[is_stochastic] = weight.detach().float().mean().item()
    assert ends[False] == 1.0
    assert ends[True] == pytest.approx(1 - 100 * 1e-4, abs=2e-4)


def test_shards_have_the_codes_of_whole_rows(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    whole = torch.randn(20, 300, generator=torch.Generator().manual_seed(3))
    plain, weight = (torch.nn.Parameter(each) for each in (whole, distribute_tensor(whole.clone(), mesh, [Shard(0)])))
    ours, theirs = (AdamW([each], state_dtype="8bit") for each in (weight, plain))
    for _ in range(2):
        plain.grad = torch.ones_like(plain)
        weight.grad = distribute_tensor(plain.grad, mesh, [Shard(1)])
        ours.step()
        theirs.step()
    ours.load_state_dict(ours.state_dict())
    for name, value in theirs.state[plain].items():
        found = ours.state[weight][name]
        if name != "step":
            assert isinstance(found, DTensor)
            assert (found.shape, found.placements) == (value.shape, (Shard(0),))
        assert torch.equal(found.full_tensor() if name != "step" else found, value)
    converted = AdamW([weight], state_dtype=torch.bfloat16)
    converted.load_state_dict(ours.state_dict())
    expected = moments.read(theirs.state[plain], "exp_avg").bfloat16()
    assert torch.equal(converted.state[weight]["exp_avg"].full_tensor(), expected)
