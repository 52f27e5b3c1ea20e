"""Engines see the tensors of lazy logits, and users see lazy logits."""

import pickle
from collections import OrderedDict

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


@pytest.mark.parametrize(("exposure", "num_seen"), [(HIDDEN_STATES, 1), (ALL_TENSORS, 2)], ids=["hidden", "all"])
def test_wrapper_sees_tensors_and_its_caller_lazy_logits(exposure, num_seen):
    model, batch = model_and_inputs()
    engine = Engine(model)
    exposure.expose_within(engine, model)
    output = engine(batch["input_ids"])
    assert len(engine.seen) == num_seen
    assert all(tensor.requires_grad for tensor in engine.seen)
    assert isinstance(output.logits, LazyLogits)
    assert type(output) is type(model(batch["input_ids"]))  # called directly, the model returns what it always did
    stock = build_model()
    for logits, parameters in ((output.logits, model), (stock(batch["input_ids"]).logits, stock)):
        nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
        gradients = OrderedDict((name, parameter.grad) for name, parameter in parameters.named_parameters())
        if parameters is model:
            expected = gradients
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-6)


def test_hidden_states_lead_to_the_parameters_of_the_head():
    model, batch = model_and_inputs()
    for parameter in model.model.parameters():
        parameter.requires_grad_(False)
    engine = Engine(model)
    HIDDEN_STATES.expose_within(engine, model)
    engine(batch["input_ids"])
    (seen,) = engine.seen
    leaves = {edge[0].variable for edge in seen.grad_fn.next_functions if hasattr(edge[0], "variable")}
    assert model.lm_head.weight in leaves


def test_hooks_that_are_registered_later_see_lazy_logits():
    model, batch = model_and_inputs()
    engine = Engine(model)
    HIDDEN_STATES.expose_within(engine, model)
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(output.logits))
    engine(batch["input_ids"])
    assert isinstance(seen[0], LazyLogits)


def test_failing_forward_leaves_the_module_as_it_was():
    model, batch = model_and_inputs()
    engine = Engine(model)
    HIDDEN_STATES.expose_within(engine, model)
    failing = model.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine(batch["input_ids"])
    failing.remove()
    assert isinstance(model(batch["input_ids"]).logits, LazyLogits)


def test_engine_with_hooks_on_the_module_itself_sees_tensors_in_a_container():
    model, batch = model_and_inputs()
    seen = []

    def engines(module, args, output):
        seen.append(output)

    model.register_forward_hook(engines)
    HIDDEN_STATES.expose(model)
    HIDDEN_STATES.expose(model)  # in place of the first
    assert isinstance(model(batch["input_ids"]).logits, LazyLogits)
    assert isinstance(seen[-1], list)
    tensors = [part for part in seen[-1] if isinstance(part, list)]
    assert [tensor.shape[-1] for (tensor,) in tensors] == [model.config.hidden_size]
    assert len(model._forward_hooks) == 1 + 2 + 1  # the engine's, ours, and the one that ends a forward with labels


def test_outputs_without_lazy_logits_pass_unchanged():
    inner = nn.Linear(2, 2)
    engine = Engine(inner)
    HIDDEN_STATES.expose_within(engine, inner)
    assert type(engine(torch.ones(1, 2))) is torch.Tensor


@pytest.mark.parametrize("exposure", [HIDDEN_STATES, ALL_TENSORS], ids=["hidden", "all"])
def test_module_with_hooks_can_be_pickled(exposure):
    model, batch = model_and_inputs()
    exposure.expose(model)
    restored = pickle.loads(pickle.dumps(model))
    assert isinstance(restored(batch["input_ids"]).logits, LazyLogits)
