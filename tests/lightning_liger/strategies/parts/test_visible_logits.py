"""Hooks that show engines the tensors of lazy logits; what engines do with these is in ``test_engines.py``."""

import pickle

import pytest

from lightning_liger import LazyLogits, apply_liger_kernels
from lightning_liger.strategies.parts.visible_logits import ALL_TENSORS, HIDDEN_STATES
from tests.lightning_liger.strategies.workers.distributed import build_model, make_batches


@pytest.mark.parametrize("exposure", [HIDDEN_STATES, ALL_TENSORS], ids=["hidden", "all"])
def test_module_with_hooks_can_be_pickled(exposure):
    model = build_model()
    apply_liger_kernels(model)
    exposure.expose(model)
    restored = pickle.loads(pickle.dumps(model))
    assert isinstance(restored(make_batches(0, 1)[0]["input_ids"]).logits, LazyLogits)
