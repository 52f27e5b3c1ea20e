"""A transformer in plain PyTorch, without Hugging Face, trained with the fused kernels and the fused loss.

    python examples/plain_module.py
    lightning-liger fit --config examples/plain_module.yaml

Nothing in ``Transformer`` knows of this package. Norms, rotary embeddings, gated MLPs and the head are found by what
they compute; a report says what was replaced. docs/examples/plain_module.md
"""

from typing import NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_liger import LigerLMMixin
from lightning_liger.data import TextDataModule


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys, ``[batch_size, num_heads, seq_len, D]``, turned by their positions (``[1, seq_len, D]``)."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return turn(q), turn(k)


class RMSNorm(nn.Module):
    """A norm as people write it."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, x: Tensor) -> Tensor:
        scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        q, k = rotate(q, k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(hidden_size), RMSNorm(hidden_size)
        self.attention, self.mlp = Attention(hidden_size, num_heads), SwiGLU(hidden_size, intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Output(NamedTuple):
    logits: Tensor
    """``[batch_size, seq_len, vocab_size]``"""


class Transformer(nn.Module):
    """A decoder. The only thing that the mixin asks of a model: its output has ``logits``."""

    def __init__(
        self, vocab_size: int, hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int
    ) -> None:
        super().__init__()
        self.head_dim = hidden_size // num_heads
        self.embed = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.ModuleList(Block(hidden_size, intermediate_size, num_heads) for _ in range(num_layers))
        self.norm = RMSNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor) -> Output:
        x = self.embed(input_ids)
        places = torch.arange(input_ids.shape[1], device=x.device)
        frequencies = 10000.0 ** -(torch.arange(0, self.head_dim, 2, device=x.device) / self.head_dim)
        angles = (places[:, None] * frequencies).repeat(1, 2)[None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return Output(self.head(self.norm(x)))


class PlainModule(LigerLMMixin, L.LightningModule):
    """The mixin has the steps: the loss is fused, and a mean over the tokens of a whole optimizer step."""

    def __init__(
        self,
        vocab_size: int = 512,
        hidden_size: int = 64,
        intermediate_size: int = 176,
        num_layers: int = 2,
        num_heads: int = 4,
        learning_rate: float = 3e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.sizes = (vocab_size, hidden_size, intermediate_size, num_layers, num_heads)

    def configure_model(self) -> None:
        if getattr(self, "model", None) is None:  # Lightning calls this hook for each stage
            self.model = Transformer(*self.sizes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"], betas=(0.9, 0.95))


def main(max_steps: int = 100, accelerator: str = "auto") -> L.Trainer:
    """Trains a small model on short stories."""
    L.seed_everything(42)
    data = TextDataModule(
        path="examples/data/text.jsonl", vocab_size=512, block_size=128, batch_size=4, validation_fraction=0.05
    )
    trainer = L.Trainer(
        strategy="liger",  # or liger_fsdp: the module stays as it is
        accelerator=accelerator,
        devices=1,
        max_steps=max_steps,
        limit_val_batches=8,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=1,
        log_every_n_steps=10,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(PlainModule(), data)
    print(trainer.strategy.patch_report)
    print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})
    return trainer


if __name__ == "__main__":
    main()
