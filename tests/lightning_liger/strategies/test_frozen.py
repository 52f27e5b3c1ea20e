"""Models, whole, with frozen parts and adapters, train under every engine as the stock model in one process.

Numbers of tokens differ between micro-batches and ranks, the user adds to the loss, and gradients are clipped.
"""

import functools

import pytest
import torch

from lightning_liger.strategies.fsdp import BackwardRepair
from tests.lightning_liger.strategies.workers.distributed import make_batches
from tests.lightning_liger.strategies.workers.frozen import (
    HAS_PEFT,
    MAX_NORM,
    NUM_BATCHES,
    OFFLOAD,
    RUNS,
    Reference,
    build_changed,
    reference_training,
)

TOLERANCE = {"cpu": 1e-5, "cuda": 2e-4}
HEAD_IS_TRAINED = {"whole": True, "tied": True, "head-only": True, "mixed": True}

needs_peft = pytest.mark.skipif(not HAS_PEFT, reason="needs PEFT")
in_each_run = pytest.mark.parametrize(
    ("engine", "change"), [pytest.param(*run, marks=needs_peft if "lora" in run[1] else ()) for run in RUNS]
)

reference_of = functools.cache(reference_training)


def assert_as_in(reference: Reference, device: str, runs: list[dict]) -> None:
    rtol = TOLERANCE[device]
    assert min(reference.norms) > MAX_NORM
    for losses, run in zip(reference.losses, runs, strict=True):
        torch.testing.assert_close(run["losses"], losses, rtol=rtol, atol=1e-7)
        torch.testing.assert_close(run["norms"], reference.norms, rtol=10 * rtol, atol=0.0)
        assert run["whole"].keys() == reference.parameters.keys()
        for name, parameter in run["whole"].items():
            # Each step moves a parameter by up to 3e-3.
            torch.testing.assert_close(parameter, reference.parameters[name], rtol=0.0, atol=10 * rtol)


def of_ranks_means(change: str, device: str) -> Reference:
    """What Fabric trains, with each rank's mean over its own tokens."""
    reference = reference_of(change, device, False, make_batches, num_micro_batches=1)
    parameters = {name.removeprefix("model."): value for name, value in reference.parameters.items()}
    return reference._replace(parameters=parameters)


@in_each_run
def test_two_ranks_train_as_one_process_with_the_stock_model(engine_runs, engine, change):
    reference, runs = reference_of(change, engine_runs.device), engine_runs.of(f"{engine}-{change}")
    assert reference.losses[1][0] == 0.0  # a rank without any label
    assert_as_in(reference, engine_runs.device, runs)
    for run in runs:
        assert run["logit_counts"] == (NUM_BATCHES, 0)


@in_each_run
def test_frozen_parameters_stay_and_trained_ones_do_not(engine_runs, engine, change):
    before = build_changed(change)
    for run in engine_runs.of(f"{engine}-{change}"):
        for name, parameter in before.named_parameters():
            assert parameter.requires_grad != run["whole"][name].equal(parameter.detach()), name


@in_each_run
def test_gradient_of_the_heads_weight_is_computed_only_if_it_is_trained(engine_runs, engine, change):
    for run in engine_runs.of(f"{engine}-{change}"):
        assert run["head_needs_gradient"] == {HEAD_IS_TRAINED.get(change, False)}


def test_offloaded_parameters_and_states_lie_in_the_memory_of_the_cpu(engine_runs):
    for run in engine_runs.of(f"{OFFLOAD}-whole"):
        assert run["devices"] == {"cpu"}
    for run in engine_runs.of("liger_fsdp-whole"):
        assert run["devices"] == {engine_runs.device}


@pytest.mark.parametrize("change", ["whole", pytest.param("lora-head", marks=needs_peft)])
def test_checkpoint_of_offloaded_parameters_loads_into_the_stock_model(engine_runs, change):
    path = engine_runs.folder / f"{OFFLOAD}-{change}.ckpt"
    saved = torch.load(path, weights_only=False, map_location="cpu")["state_dict"]
    saved = {name.removeprefix("model."): value for name, value in saved.items()}
    stock = build_changed(change)
    stock.load_state_dict(saved)
    for run in engine_runs.of(f"{OFFLOAD}-{change}"):
        torch.testing.assert_close(dict(stock.named_parameters()), run["whole"], rtol=0.0, atol=0.0)


def test_fabric_offloads_clips_and_trains_as_one_process(engine_runs):
    assert_as_in(of_ranks_means("whole", engine_runs.device), engine_runs.device, engine_runs.of(f"fabric-{OFFLOAD}"))


class BroughtToTheCPU(torch.nn.Module):
    """Treats gradients as FSDP does on their way to the CPU: each over the last, which forward shows again."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        self.gradient: torch.Tensor | None = None

    def forward(self, factor):
        self.used.grad = self.gradient
        return (factor * self.used).sum()

    def backward(self, loss):
        (gradient,) = torch.autograd.grad(loss, self.used)
        self.gradient = gradient if self.gradient is None else self.gradient.copy_(gradient)
        self.used.grad = self.gradient


@pytest.mark.parametrize("cleared", ["before forward", "after forward"])
def test_micro_batches_add_up_where_each_gradient_is_brought_over_the_last(cleared):
    model, repair = BroughtToTheCPU(), BackwardRepair()
    model.register_forward_pre_hook(repair.note_gradients)
    model.unused.grad = torch.full((3,), 5.0)
    for _ in range(2):
        for step, factor in enumerate((1.0, 2.0, 4.0)):
            if step == 0 and cleared == "before forward":
                model.used.grad = None
            loss = model(factor)
            if step == 0 and cleared == "after forward":
                model.used.grad = None
            with torch.no_grad():
                if step == 1:
                    model(8.0)  # of an evaluation
            with repair.context():
                model.backward(loss)
        assert model.used.grad.tolist() == [7.0] * 3
        assert model.unused.grad.tolist() == [5.0] * 3
