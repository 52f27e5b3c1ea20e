"""Language models that are no Hugging Face models: the head is found by its size."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_liger import apply_liger_kernels
from lightning_liger.patching.rules import Patched
from tests.lightning_liger.patching.rules.comparing import assert_same_gradients

VOCAB_SIZE = 67


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.b(x) * F.silu(self.a(x)))


class PlainLM(nn.Module):
    """Written as people write their own."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB_SIZE, 16), nn.Embedding(32, 16)
        blocks = (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.RMSNorm(16, 1e-5), SwiGLU()) for _ in range(2))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(16, VOCAB_SIZE, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = x + block(x).cumsum(1)
        logits = self.head(x)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_plain_model_gets_every_kernel_that_fits_and_computes_the_same(tied: bool) -> None:
    torch.manual_seed(0)
    model = PlainLM(tied)
    patched = copy.deepcopy(model)
    report = apply_liger_kernels(patched)
    replaced = {entry.kernel: entry.count for entry in report.entries if entry.replacement is not None}
    assert replaced == {"layer_norm": 2, "rms_norm": 2, "silu_mul": 2, "linear_cross_entropy": 1}
    tokens, targets = torch.randint(VOCAB_SIZE, (2, 2, 9))
    targets[0, :4] = -1
    losses = [each(tokens, targets)[1] for each in (model, patched)]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    assert_same_gradients(model, patched)
    assert patched.head.fusion_counters.num_losses == 1
    with torch.no_grad():
        torch.testing.assert_close(patched(tokens)[0], model(tokens)[0])
    report.undo()
    assert not any(isinstance(module, Patched) for module in patched.modules())


def test_head_that_is_not_the_only_one_of_its_size_stays() -> None:
    model = PlainLM(tied=False)
    model.second_head = nn.Linear(16, VOCAB_SIZE)
    report = apply_liger_kernels(model)
    assert "linear_cross_entropy" not in {entry.kernel for entry in report.entries}
    assert type(model.head) is nn.Linear
