"""Models with a router's loss train as plain Lightning modules on the loss that docs/training.md defines."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_liger import LigerSingleDeviceStrategy, apply_liger_kernels
from tests.lightning_liger.post_training.training import LM, Recorded, assert_same_parameters, fit
from tests.lightning_liger.tiny import tiny_batch, tiny_model

SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 16, "mlp_only_layers": [0], "norm_topk_prob": True},
    "olmoe": {"num_experts": 7, "norm_topk_prob": False},
}

Batch = dict[str, Tensor]


class Plain(Recorded):
    """Trains on the model's own loss, of which each batch has a share in its step."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        share = batch.pop("share") * self.trainer.accumulate_grad_batches
        loss: Tensor = self.model(**batch).loss
        return loss * share


def make_model(architecture: str, rng: random.Random) -> PreTrainedModel:
    """A coefficient so large that steps go along with the router's loss."""
    options = SIZES[architecture] | {"num_experts_per_tok": rng.choice((1, 2, 3))}
    coefficient = rng.choice((0.5, 2.0))
    return tiny_model(architecture, **options, output_router_logits=True, router_aux_loss_coef=coefficient)


def routers(model: PreTrainedModel) -> list[Tensor]:
    return [weight.detach() for name, weight in model.named_parameters() if name.endswith("mlp.gate.weight")]


def make_step(rng: random.Random, num_batches: int, padding: str) -> list[Batch]:
    """Micro-batches of other sizes and numbers of labels each."""
    batches = []
    for _ in range(num_batches):
        size, length = rng.randint(1, 3), rng.randint(4, 12)
        batch = tiny_batch(size, length, rng.randint(0, length - 2), seed=rng.randrange(1000))
        if padding != "none":
            mask = torch.ones(size, length, dtype=torch.int64)
            for row in mask:
                number = rng.randint(0, length - 3)
                row[length - number :] = 0
            if padding == "left":
                mask = mask.flip(-1)
            batch |= {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
            batch["labels"][0, -2:] = batch["input_ids"][0, -2:]  # at least one, wherever the mask is
        batches.append(batch)
    return batches


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("architecture", SIZES)
def test_random_programs_train_as_plain_twins(architecture: str, padding: str) -> None:
    rng = random.Random(f"{architecture} {padding}")
    stock = make_model(architecture, rng)
    assert routers(stock)
    for normalization in ("tokens", "micro_batch"):
        num_batches = rng.choice((1, 2, 3))
        batches = [batch for _ in range(2) for batch in make_step(rng, num_batches, padding)]
        counts = torch.tensor([float((batch["labels"][:, 1:] != -100).sum()) for batch in batches])
        if normalization == "micro_batch":
            counts = torch.ones_like(counts)
        shares = (counts.view(2, -1) / counts.view(2, -1).sum(1, keepdim=True)).flatten()
        assert (counts > 0).all()
        twin = Plain(model=copy.deepcopy(stock))
        shared = [{**batch, "share": share} for batch, share in zip(batches, shares, strict=True)]
        fit(twin, shared, strategy="auto", accumulate_grad_batches=num_batches)

        module = LM(copy.deepcopy(stock))
        module.loss_normalization = normalization
        checkpointing = rng.choice(("none", "full"))
        strategy = LigerSingleDeviceStrategy(activation_checkpointing=checkpointing)
        fit(module, copy.deepcopy(batches), strategy=strategy, accumulate_grad_batches=num_batches)
        assert_same_parameters(module.model, twin.model, rtol=1e-4, atol=2e-6)
        moved = [each - before for each, before in zip(routers(twin.model), routers(stock), strict=True)]
        assert all(each.abs().max() > 1e-3 for each in moved)

        patched = Plain(model=copy.deepcopy(stock))
        apply_liger_kernels(patched.model)
        fit(patched, shared, strategy="auto", accumulate_grad_batches=num_batches)
        assert_same_parameters(patched.model, twin.model, rtol=1e-4, atol=2e-6)
