"""Engines see the tensors of lazy logits, and users see lazy logits."""

import pickle

import pytest
import torch
from torch import nn

from lightning_liger import LazyLogits, apply_liger_kernels
from lightning_liger.strategies.parts.visible_logits import ALL_TENSORS, HIDDEN_STATES
from tests.lightning_liger.strategies.workers.distributed import build_model, make_batches


class Engine(nn.Module):
    """Replaces every tensor in lists by twice itself, as engines that pass outputs through the graph replace them."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.seen = []

    def forward(self, *args, **kwargs):
        return self.look(self.module(*args, **kwargs))

    def look(self, output):
        if isinstance(output, list):
            return [self.look(part) for part in output]
        if isinstance(output, torch.Tensor):
            self.seen.append(output)
            return output * 1.0
        return output


def model_and_inputs():
    model = build_model()
    apply_liger_kernels(model)
    return model, make_batches(0, 1)[0]


def exposed(exposure=HIDDEN_STATES):
    model, batch = model_and_inputs()
    engine = Engine(model)
    exposure.expose_within(engine, model)
    return engine, model, batch


@pytest.mark.parametrize(("exposure", "num_seen"), [(HIDDEN_STATES, 1), (ALL_TENSORS, 2)], ids=["hidden", "all"])
def test_wrapper_sees_tensors_and_its_caller_lazy_logits(exposure, num_seen):
    engine, model, batch = exposed(exposure)
    output = engine(batch["input_ids"])
    assert len(engine.seen) == num_seen
    assert all(tensor.requires_grad for tensor in engine.seen)
    reached = {function for tensor in engine.seen for function, _ in tensor.grad_fn.next_functions}
    assert any(getattr(each, "variable", None) is model.lm_head.weight for each in reached)
    assert isinstance(output.logits, LazyLogits)
    assert output.logits.hidden_states.grad_fn.name() == "MulBackward0"  # what the engine returned
    assert type(output) is type(model(batch["input_ids"]))  # called directly, the model returns what it always did
    stock, gradients = build_model(), []
    for logits, parameters in ((output.logits, model), (stock(batch["input_ids"]).logits, stock)):
        nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
        gradients.append({name: parameter.grad for name, parameter in parameters.named_parameters()})
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_hooks_that_are_registered_later_see_lazy_logits_and_a_failing_one_leaves_the_module_as_it_was():
    engine, model, batch = exposed()
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(output.logits))
    engine(batch["input_ids"])
    assert isinstance(seen[0], LazyLogits)
    failing = model.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine(batch["input_ids"])
    failing.remove()
    assert isinstance(model(batch["input_ids"]).logits, LazyLogits)


def test_engine_with_hooks_on_the_module_itself_sees_tensors_in_a_container():
    model, batch = model_and_inputs()
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(output))
    HIDDEN_STATES.expose(model)
    HIDDEN_STATES.expose(model)  # in place of the first
    assert isinstance(model(batch["input_ids"]).logits, LazyLogits)
    tensors = [part for part in seen[-1] if isinstance(part, list)]
    assert [tensor.shape[-1] for (tensor,) in tensors] == [model.config.hidden_size]
    assert len(model._forward_hooks) == 1 + 2 + 1  # the engine's, ours, and the one that ends a forward with labels


@pytest.mark.parametrize("exposure", [HIDDEN_STATES, ALL_TENSORS], ids=["hidden", "all"])
def test_module_with_hooks_can_be_pickled(exposure):
    model, batch = model_and_inputs()
    exposure.expose(model)
    restored = pickle.loads(pickle.dumps(model))
    assert isinstance(restored(batch["input_ids"]).logits, LazyLogits)
