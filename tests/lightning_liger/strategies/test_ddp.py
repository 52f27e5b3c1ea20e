"""``liger_ddp`` trains as Lightning's DDP does with the stock model, whatever options DDP gets."""

import lightning as L
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_liger import FabricLigerDDPStrategy, LazyLogits
from tests.lightning_liger.strategies.workers.distributed import (
    build_model,
    launch,
    make_batches,
)
from tests.lightning_liger.strategies.workers.distributed_ddp import NUM_STEPS

RUNS = {
    **dict.fromkeys(("trainer-untied", "trainer-tied"), ("name", "find-unused", "static-graph")),
    **dict.fromkeys(("trainer-own-step-untied", "trainer-own-step-tied"), ("name", "find-unused")),
    **dict.fromkeys(("fabric-untied", "fabric-tied"), ("labels", "logits", "find-unused", "static-graph")),
    **dict.fromkeys(("fabric-unused", "fabric-frozen"), ("labels", "logits")),
}
"""What was trained, and the ways in which it was."""


RELATIVE_TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}
"""In float32: AdamW multiplies rounding differences, and GPUs sum in other orders."""


# Two processes


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def ranks(request, tmp_path_factory):
    """The tolerance of the device and what both ranks got out of every run."""
    worker = "tests.lightning_liger.strategies.workers.distributed_ddp"
    return RELATIVE_TOLERANCE[request.param], launch(request.param, tmp_path_factory.mktemp("ranks"), worker=worker)


@pytest.mark.parametrize(("trained", "way"), [(trained, way) for trained, ways in RUNS.items() for way in ways])
def test_two_ranks_train_as_with_lightnings_ddp_and_the_stock_model(ranks, trained, way):
    tolerance, of_ranks = ranks
    for results in of_ranks:
        stock, ours = results[trained]["stock"], results[trained][way]
        assert stock["num_replaced"] == 0
        assert ours["num_replaced"] == 10
        assert ours["logit_counts"] == (NUM_STEPS, 0)
        torch.testing.assert_close(ours["losses"], stock["losses"], rtol=tolerance, atol=0.0)
        # Six steps moved parameters by about 0.02.
        torch.testing.assert_close(ours["parameters"], stock["parameters"], rtol=tolerance, atol=10 * tolerance)
    first, *others = (results[trained][way] for results in of_ranks)
    for other in others:
        assert first["losses"][0] != other["losses"][0]  # each rank has its own data
        torch.testing.assert_close(first["parameters"], other["parameters"], rtol=0.0, atol=0.0)


@pytest.mark.parametrize("trained", RUNS)
def test_every_way_that_was_trained_is_compared(ranks, trained):
    for results in ranks[1]:
        assert set(results) == set(RUNS)
        assert set(results[trained]) == {"stock", *RUNS[trained]}


# One process


def fabric_model(**options):
    fabric = L.Fabric(strategy=FabricLigerDDPStrategy(**options), accelerator="cpu", devices=1)
    fabric.launch()
    return fabric, fabric.setup_module(build_model())


@pytest.mark.filterwarnings("ignore:.*materializes the logits")
def test_logits_that_the_model_wrote_to_are_real_where_unused_parameters_are_sought():
    fabric, model = fabric_model(find_unused_parameters=True)
    (batch,) = make_batches(0, 1)
    assert isinstance(model(batch["input_ids"]).logits, LazyLogits)

    def double_first_token(module, args, output):
        output.logits.abs()  # whole logits from here on
        output.logits[:, 0] *= 2
        return output

    def gradient(model):
        model.zero_grad()
        logits = model(batch["input_ids"]).logits
        assert isinstance(logits, torch.Tensor)
        fabric.backward(logits.square().sum())
        return next(parameter.grad for name, parameter in model.named_parameters() if name.endswith("lm_head.weight"))

    stock = build_model()
    stock.register_forward_hook(double_first_token)
    model.module.register_forward_hook(double_first_token)
    torch.testing.assert_close(gradient(model), gradient(stock), rtol=1e-5, atol=1e-5)


def test_evaluation_of_lazy_logits_needs_no_gradients():
    _, model = fabric_model(find_unused_parameters=True)
    (batch,) = make_batches(0, 1)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(model(**batch).loss, build_model()(**batch).loss, rtol=1e-6, atol=0.0)


def test_plain_ddp_stays_torchs_own_class():
    assert type(fabric_model()[1]._forward_module) is DistributedDataParallel
