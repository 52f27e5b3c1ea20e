"""A training loop of your own with Lightning Fabric: gradient accumulation, clipping, validation, a checkpoint.

    python examples/fabric_loop.py
    python examples/fabric_loop.py --strategy liger_fsdp --devices 8 --precision bf16-mixed --steps 1000

The strategy puts the kernels into the model, whose loss is then fused. docs/examples/fabric_loop.md
"""

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import lightning_liger  # registers the strategies
from lightning_liger.data import TextDataModule

SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "use_cache": False,
}  # fmt: skip


def make_model(fabric: L.Fabric, **sizes: Any) -> PreTrainedModel:
    """A Llama with random weights; ``AutoModelForCausalLM.from_pretrained(folder)`` for a pretrained one."""
    with fabric.init_module():
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **(SIZES | sizes)))


def forever(loader: Iterable[Any]) -> Iterator[Any]:
    """Batches of one epoch after the other."""
    while True:
        yield from loader


def train(
    fabric: L.Fabric,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[dict[str, Tensor]],
    steps: int,
    accumulate: int = 2,
) -> list[Tensor]:
    """Optimizer steps of ``accumulate`` batches each; returns their losses, scalars on the device."""
    model.train()
    batches, losses = forever(loader), []
    for _ in range(steps):
        micro_batches = [next(batches) for _ in range(accumulate)]
        total = torch.zeros((), device=fabric.device)
        for index, batch in enumerate(micro_batches):
            is_last = index == accumulate - 1
            with fabric.no_backward_sync(model, enabled=not is_last):  # ranks sum their gradients once a step
                loss = model(**batch).loss / accumulate
                fabric.backward(loss)
            total += loss.detach()
        # The default, True, would make the host wait for the device in each step.
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@torch.no_grad()
def validate(fabric: L.Fabric, model: nn.Module, loader: Iterable[dict[str, Tensor]]) -> float:
    """The mean loss over all ranks. Inside ``lazy_logits`` the loss is fused without gradients too."""
    model.eval()
    with lightning_liger.lazy_logits():
        losses = torch.stack([model(**batch).loss.detach() for batch in loader])
    return float(fabric.all_reduce(losses.mean()))


def main(arguments: list[str] | None = None) -> tuple[list[float], float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="liger", help="liger, liger_ddp, liger_fsdp (default: liger)")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoint", default="runs/fabric_loop/last.ckpt")
    options = parser.parse_args(arguments)

    fabric = L.Fabric(
        strategy=options.strategy, devices=options.devices, accelerator=options.accelerator, precision=options.precision
    )
    fabric.launch()
    fabric.seed_everything(42)

    data = TextDataModule(
        path="examples/data/text.jsonl", vocab_size=SIZES["vocab_size"], block_size=128, batch_size=4,
        validation_fraction=0.05,
    )  # fmt: skip
    with fabric.rank_zero_first():
        data.prepare_data()
    data.setup()
    # The data module's loader divides the rows over the ranks itself.
    train_loader = fabric.setup_dataloaders(data.train_dataloader(), use_distributed_sampler=False)
    val_loader = fabric.setup_dataloaders(data.val_dataloader())

    model = make_model(fabric)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)
    losses = [float(loss) for loss in train(fabric, model, optimizer, train_loader, options.steps)]
    val_loss = validate(fabric, model, val_loader)
    fabric.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps, validation {val_loss:.3f}")
    fabric.save(options.checkpoint, {"model": model, "optimizer": optimizer})
    return losses, val_loss


if __name__ == "__main__":
    main()
