"""``liger_ddp`` with Fabric on one process, where DDP looks at what the model returns."""

import pytest
import torch

from lightning_liger import FabricLigerDDPStrategy, LazyLogits
from tests.lightning_liger.strategies.workers.distributed import build_model, launched_fabric, make_batches


def fabric_model(**options):
    fabric = launched_fabric(FabricLigerDDPStrategy(**options))
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

    gradients = []
    for each, inner in ((model, model.module), (stock := build_model(), stock)):
        inner.register_forward_hook(double_first_token)
        logits = each(batch["input_ids"]).logits
        assert isinstance(logits, torch.Tensor)
        fabric.backward(logits.square().sum())
        gradients.append(inner.lm_head.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_evaluation_of_lazy_logits_needs_no_gradients():
    _, model = fabric_model(find_unused_parameters=True)
    (batch,) = make_batches(0, 1)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(model(**batch).loss, build_model()(**batch).loss, rtol=1e-6, atol=0.0)


def test_hooks_that_are_registered_later_see_lazy_logits_and_a_failing_one_leaves_the_module_as_it_was():
    _, model = fabric_model(find_unused_parameters=True)
    (batch,), seen = make_batches(0, 1), []
    model.module.register_forward_hook(lambda module, args, output: seen.append(output.logits))
    model(batch["input_ids"])
    assert isinstance(seen[0], LazyLogits)
    failing = model.module.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch["input_ids"])
    failing.remove()
    assert isinstance(model.module(batch["input_ids"]).logits, LazyLogits)
