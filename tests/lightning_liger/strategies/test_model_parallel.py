"""``liger_model_parallel`` on one process: what it shards, and what it refuses."""

import lightning as L
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from lightning_liger import LigerModelParallelStrategy
from tests.lightning_liger.strategies.workers.distributed import (
    LM,
    Losses,
    build_model,
    launched_fabric,
    make_batches,
    make_optimizer,
    make_trainer,
)


@pytest.mark.parametrize("layer", ["Linear", "Embedding"])
def test_policy_that_splits_a_tied_pair_is_refused(tmp_path, layer):
    strategy = LigerModelParallelStrategy(auto_wrap_policy=[layer])
    trainer = make_trainer(root=tmp_path, strategy=strategy, devices=1)
    with pytest.raises(ValueError, match=r"puts 'model.model.embed_tokens' and 'model.lm_head', which share"):
        trainer.fit(LM(tied=True), [make_batches(0, 1)[0]])
    torch.distributed.destroy_process_group()


class OfLists(L.LightningModule):
    """A language model whose layers are in lists of the module itself, which FSDP2 refuses as units."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(32, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(16, 16)) for _ in range(2))
        self.parts = torch.nn.ModuleDict({"last": torch.nn.ModuleList([torch.nn.Linear(16, 32)])})
        self.again = torch.nn.ModuleList([self.layers[0][0], self.layers[1]])  # other names of what has units

    def training_step(self, ids, batch_idx):
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).relu()
        logits = self.parts["last"][0](hidden)
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def test_module_with_lists_of_modules_trains_as_on_one_device(tmp_path):
    batches = list(torch.randint(32, (4, 2, 8), generator=torch.Generator().manual_seed(0)))
    found, expected = Losses(), Losses()
    for recorder, strategy in ((found, "liger_model_parallel"), (expected, "liger")):
        module = OfLists()
        make_trainer(recorder, root=tmp_path, strategy=strategy).fit(module, DataLoader(batches, batch_size=None))
        if recorder is found:
            sharded = {name for name, child in module.named_modules() if isinstance(child, FSDPModule)}
            assert "configure_model" not in vars(module)
    assert sharded == {"embedding", "layers.0", "layers.1", "parts.last.0"}
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-6, atol=0)
    assert len(found.losses) == 4 != found.losses[0]


def test_fabric_refuses_an_optimizer_of_parameters_that_sharding_replaces_and_trains_in_the_order_it_names():
    fabric = launched_fabric("liger_model_parallel")
    model = build_model()
    optimizer = make_optimizer(model.parameters())
    with pytest.raises(RuntimeError, match="then make the optimizer of model"):
        fabric.setup(model, optimizer)
    model = fabric.setup_module(model)
    with pytest.raises(RuntimeError, match=r"AdamW has no sharded parameter.*then make the optimizer of model"):
        fabric.setup_optimizers(optimizer)
    optimizer = fabric.setup_optimizers(make_optimizer(model.parameters()))
    before = [parameter.full_tensor().clone() for parameter in model.parameters()]
    fabric.backward(model(**make_batches(0, 1)[0]).loss)
    optimizer.step()
    assert not any(old.equal(new.full_tensor()) for old, new in zip(before, model.parameters(), strict=True))
