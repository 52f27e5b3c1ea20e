"""Context parallelism sets an attribute that is private to transformers, and notices when it has no effect."""

import pytest
import torch
from transformers import PreTrainedConfig

from lightning_liger import ContextParallel
from tests.lightning_liger.tiny import tiny_model


def test_configuration_that_ignores_the_private_attribute_is_an_error(tmp_path, monkeypatch):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = tiny_model("llama")
    context = ContextParallel(1)
    context.apply(model)
    context.undo(model)
    monkeypatch.setattr(PreTrainedConfig, "_attn_implementation", property(lambda self: self.renamed))
    model.config.renamed = "eager"
    model.set_attn_implementation = lambda name: setattr(model.config, "renamed", name)
    with pytest.raises(RuntimeError, match=r"LlamaConfig does not follow _attn_implementation_internal"):
        context.apply(model)
