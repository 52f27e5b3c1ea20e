"""Medusa's heads: further LM heads on the last hidden states, each of which predicts a token further ahead.

Head k (from 0) is ``W2_k h_k`` with ``h_k = SiLU(W1_k h + b1_k) + h``, once or several times, and predicts the token
k + 2 after the one that h belongs to (arXiv:2401.10774, section 2.1.1). A head starts as the model's own: W1 and b1 are
zero, and W2 is a copy of the LM head. With a shared head, W2 is the LM head itself.

The state dict of :class:`MedusaHeads`, and the file of :func:`save_medusa_heads`, have the names that Medusa's own code
and inference engines read: ``{head}.{layer}.linear.weight``, ``{head}.{layer}.linear.bias`` and, after the last layer,
``{head}.{num_layers}.weight``.
"""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from liger_ops.arguments import check_bool, check_integer, check_path, shown, wrong_type, wrong_value
from lightning_liger.hub import is_hub_name, snapshot
from lightning_liger.weights.pretrained import naming_damaged, share_pretrained

WEIGHTS_NAME = "medusa_lm_head.safetensors"


class _ZeroLinear(nn.Linear):
    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class MedusaBlock(nn.Module):
    """``SiLU(W x + b) + x``, the identity before training."""

    def __init__(self, hidden_size: int, **factory: Any) -> None:
        super().__init__()
        self.linear = _ZeroLinear(hidden_size, hidden_size, **factory)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.silu(self.linear(hidden_states)) + hidden_states


class MedusaHead(nn.Sequential):
    """Residual blocks and, unless the LM head is shared, a projection onto the vocabulary."""

    def get_output_embeddings(self) -> nn.Module | None:
        """The projection, which returns lazy logits once kernels are applied; None if the LM head is shared."""
        last = self[-1]
        return None if isinstance(last, MedusaBlock) else last


class MedusaHeads(nn.Sequential):  # not a ModuleList, which FSDP2 refuses
    """Additional heads of a causal language model.

    Args:
        hidden_size: Of the model's last hidden states.
        vocab_size: Of its logits; None if all heads share the model's LM head.
        num_heads: How many tokens after the next one are predicted.
        num_layers: Residual blocks of each head.
        bias: Whether projections have a bias.
        factory: ``device`` and ``dtype`` of the parameters.

    Raises:
        TypeError: For arguments of a wrong type.
        ValueError: For sizes below 1, and for heads without any parameters.
    """

    def __init__(
        self, hidden_size: int, vocab_size: int | None, num_heads: int = 5, num_layers: int = 1, *, bias: bool = False,
        **factory: Any,
    ) -> None:  # fmt: skip
        check_integer("hidden_size", hidden_size, at_least=1)
        check_integer("vocab_size", vocab_size, at_least=1, optional=True)
        check_sizes(num_heads, num_layers, is_shared=vocab_size is None)
        check_bool("bias", bias)
        super().__init__()
        for _ in range(num_heads):
            layers: list[nn.Module] = [MedusaBlock(hidden_size, **factory) for _ in range(num_layers)]
            if vocab_size is not None:
                layers.append(nn.Linear(hidden_size, vocab_size, bias=bias, **factory))
            self.append(MedusaHead(*layers))

    @classmethod
    def of(
        cls, model: nn.Module, num_heads: int = 5, num_layers: int = 1, *, shared_head: bool = False
    ) -> "MedusaHeads":
        """Heads for a model, with copies of its LM head, on its device and in its dtype.

        Heads of a model on the meta device get the values of the LM head when they are materialized, if that has a
        checkpoint from :func:`~lightning_liger.load_pretrained`, and random ones otherwise.

        Args:
            model: A Hugging Face causal language model.
            num_heads: As for the class, like ``num_layers``.
            num_layers: As for the class.
            shared_head: Whether the heads use the model's LM head and have blocks only.

        Raises:
            TypeError: If the model has no LM head.
        """
        check_bool("shared_head", shared_head)
        head = head_of(model)
        heads = cls(
            head.in_features, None if shared_head else head.out_features, num_heads, num_layers,
            bias=head.bias is not None, device=head.weight.device, dtype=head.weight.dtype,
        )  # fmt: skip
        if not shared_head:
            heads._copy(model, head)
        return heads

    @torch.no_grad()
    def _copy(self, model: nn.Module, head: nn.Module) -> None:
        own = [each[-1] for each in cast(Iterable[MedusaHead], self)]
        for name, parameter in head.named_parameters(recurse=False):
            copies = [cast(Tensor, getattr(each, name)) for each in own]
            if parameter.is_meta:
                share_pretrained(model, self, (head, name), [(each, name) for each in own])
                continue
            gathered: Any = contextlib.nullcontext()
            if any(hasattr(each, "ds_id") for each in (parameter, *copies)):  # partitioned by ZeRO-3
                import deepspeed

                gathered = deepspeed.zero.GatheredParameters([parameter, *copies], modifier_rank=0)
            with gathered:
                for copy in copies:
                    copy.copy_(parameter)

    def forward(self, hidden_states: Tensor) -> list[Tensor]:
        """The output of each head for ``[..., hidden_size]``: logits, or hidden states if the LM head is shared."""
        return [head(hidden_states) for head in self]

    @property
    def num_layers(self) -> int:
        """The number of residual blocks of each head."""
        return sum(isinstance(layer, MedusaBlock) for layer in cast(MedusaHead, self[0]))

    @property
    def is_shared(self) -> bool:
        """Whether heads have no projection of their own."""
        return cast(MedusaHead, self[0]).get_output_embeddings() is None


def head_of(model: nn.Module) -> Any:
    """The LM head of a Hugging Face model; raises TypeError if the model has none that is a linear layer."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    if not hasattr(head, "in_features"):
        raise wrong_type("model", "a Hugging Face causal language model with an LM head", model)
    return head


def check_sizes(num_heads: int, num_layers: int, *, is_shared: bool) -> None:
    """Raises unless there are heads with parameters."""
    check_integer("num_heads", num_heads, at_least=1)
    check_integer("num_layers", num_layers, at_least=0)
    if is_shared and not num_layers:
        raise wrong_value("num_layers", "at least 1 with a shared LM head, as heads have nothing else", num_layers)


def save_medusa_heads(heads: MedusaHeads, folder: str | Path, *, base_model: str | None = None) -> None:
    """Writes heads to ``medusa_lm_head.safetensors`` and ``config.json``, as Medusa's own code has them.

    ``config.json`` has ``medusa_num_heads``, ``medusa_num_layers`` and ``base_model_name_or_path``. With a shared LM
    head the file has residual blocks only.

    Args:
        heads: Not sharded by an engine.
        folder: Created if it does not exist; files of these names are replaced.
        base_model: Name or folder of the model that the heads belong to.

    Raises:
        TypeError: For arguments of a wrong type.
        ValueError: For parameters that are sharded or on the meta device.
    """
    _check_heads(heads, folder)
    folder, tensors = Path(folder), {name: tensor.detach().contiguous() for name, tensor in heads.state_dict().items()}
    for name, tensor in tensors.items():
        if tensor.is_meta or isinstance(tensor, DTensor) or not tensor.numel():
            raise wrong_value("heads", "whole tensors with values; save them from a loaded checkpoint", name)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS_NAME)
    config: dict[str, Any] = {"medusa_num_heads": len(heads), "medusa_num_layers": heads.num_layers}
    config["base_model_name_or_path"] = base_model
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_medusa_heads(heads: MedusaHeads, folder: str | Path) -> None:
    """Reads what :func:`save_medusa_heads`, or Medusa's own code, wrote.

    Raises:
        FileNotFoundError: If the folder has no ``medusa_lm_head.safetensors``.
        ValueError: If names or shapes differ.
    """
    _check_heads(heads, folder)
    with naming_damaged(find_heads(folder)):
        tensors = load_file(find_heads(folder))
    own = heads.state_dict()
    wrong = sorted(own.keys() ^ tensors.keys())
    wrong += [name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape]
    if wrong:
        raise wrong_value("folder", f"heads that fit these, but {shown(wrong[:4])} differ", str(folder))
    heads.load_state_dict(tensors)


def _check_heads(heads: Any, folder: Any) -> None:
    if not isinstance(heads, MedusaHeads):
        raise wrong_type("heads", "MedusaHeads", heads)
    check_path("folder", folder)


def find_heads(folder: str | Path) -> Path:
    """The file of heads in a folder, or in a repository of the Hub; raises FileNotFoundError without one."""
    path = (snapshot("folder", str(folder), WEIGHTS_NAME) if is_hub_name(folder) else Path(folder)) / WEIGHTS_NAME
    if not path.is_file():
        raise FileNotFoundError(f"folder must have {WEIGHTS_NAME}, got {str(folder)!r}")
    return path
