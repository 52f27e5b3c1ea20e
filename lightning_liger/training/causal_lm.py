"""A finished LightningModule for a Hugging Face causal LM, so that a yaml file is a whole program."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightning_liger.training.mixin import LigerLMMixin
from lightning_liger.training.protocol import engine_of
from lightning_liger.weights.pretrained import load_pretrained


class LigerCausalLM(LigerLMMixin, L.LightningModule):
    """A causal language model with AdamW and a warm-up and cosine schedule.

    Under ``liger_fsdp`` and ``liger_model_parallel`` the model need not fit one device: it gets its weights when it is
    sharded, see :func:`~lightning_liger.load_pretrained`.

    Args:
        pretrained: Folder of a Hugging Face checkpoint to start from. None starts from random weights.
        model_type: Architecture of a model with random weights, as in a ``config.json`` ("llama", "qwen3", ...).
        config: The architecture's settings where they differ from its defaults; with ``pretrained``, what to change.
        attn_implementation: Attention that transformers uses.
        learning_rate: Peak learning rate.
        embedding_lr_scale: Factor of the learning rate for the input embeddings. With random weights, 10 to 30 lets a
            small model tell tokens apart much sooner; 1 is the usual choice for large and for pretrained ones.
        weight_decay: Decay of matrices; vectors (norms, biases) do not decay.
        betas: AdamW's averaging factors.
        warmup_steps: Steps in which the learning rate rises to its peak.
        min_lr_ratio: Share of the peak that is left at the last step; 1 keeps the learning rate constant.
        loss_normalization: ``"tokens"``, the mean over all target tokens of an optimizer step, or ``"micro_batch"``,
            the mean of the micro-batches' means.
        max_new_tokens: Tokens that ``predict`` adds to a prompt.
        temperature: Of sampling in ``predict``; 0 takes the likeliest token.

    Raises:
        FileNotFoundError: If ``pretrained`` is no folder with a ``config.json``.
        ValueError: For an unknown architecture or a setting out of its range.
    """

    model: PreTrainedModel

    def __init__(
        self,
        pretrained: str | None = None,
        model_type: str = "llama",
        config: dict[str, Any] | None = None,
        attn_implementation: str = "sdpa",
        learning_rate: float = 3e-4,
        embedding_lr_scale: float = 1.0,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int = 0,
        min_lr_ratio: float = 0.1,
        loss_normalization: str = "tokens",
        max_new_tokens: int = 64,
        temperature: float = 0.8,
    ) -> None:
        self.loss_normalization = loss_normalization
        super().__init__()
        self.save_hyperparameters()
        if pretrained is not None and not (Path(pretrained) / "config.json").is_file():
            raise FileNotFoundError(
                f"pretrained must be a Hugging Face checkpoint folder (config.json and weights), got {pretrained!r}"
            )
        if not 0.0 <= min_lr_ratio <= 1.0:
            raise ValueError(f"min_lr_ratio must be between 0 and 1, got {min_lr_ratio}")
        if not embedding_lr_scale > 0.0:
            raise ValueError(f"embedding_lr_scale must be positive, got {embedding_lr_scale}")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {warmup_steps}")
        if temperature < 0.0:
            raise ValueError(f"temperature must not be negative, got {temperature}")
        if "trust_remote_code" in (config or {}):  # also in a checkpoint's hyperparameters
            raise ValueError("config must not have trust_remote_code: code in the checkpoint's folder is never run")
        if pretrained is None:
            self.config = AutoConfig.for_model(model_type, **(config or {}))
        else:
            self.config = AutoConfig.from_pretrained(pretrained, trust_remote_code=False, **(config or {}))

    def configure_model(self) -> None:
        """Builds the model once: on the meta device for strategies that shard it there, else where it will train.

        Without a Trainer, on torch's default device.

        Raises:
            ValueError: For an architecture that cannot be built on the meta device, and weights that do not fit.
        """
        if getattr(self, "model", None) is not None:
            return
        pretrained, strategy = self._settings.pretrained, None if self._trainer is None else self.trainer.strategy
        device = torch.get_default_device() if strategy is None else strategy.root_device
        if self._trainer is not None and engine_of(self.trainer).materializes:
            device = torch.device("meta")
        settings = {"attn_implementation": self._settings.attn_implementation, "dtype": torch.get_default_dtype()}
        settings["trust_remote_code"] = False
        with device:
            if pretrained is None or device.type == "meta":
                self.model = AutoModelForCausalLM.from_config(self.config, **settings)
            else:
                self.model = AutoModelForCausalLM.from_pretrained(
                    pretrained, config=self.config, local_files_only=True, **settings
                )
        if device.type == "meta":
            self._leave_weights_to_strategy()
        if strategy is not None:  # an exported config keeps what it was
            self.model.config.use_cache = False
        self.model.train()

    def _leave_weights_to_strategy(self) -> None:
        if self._settings.pretrained is not None:
            load_pretrained(self.model, self._settings.pretrained)
        elif not all(parameter.is_meta for parameter in self.model.parameters()):
            # Their constructors ignore torch's device, and their values would never be set.
            raise ValueError(
                f"model_type={self.config.model_type!r} cannot be built on the meta device with random weights, as"
                " strategies that shard do: set pretrained, or use strategy='liger_ddp'"
            )

    @property
    def _settings(self) -> Any:
        """The arguments of ``__init__``; Lightning types them as a mapping, whose items are attributes too."""
        return self.hparams

    def configure_optimizers(self) -> OptimizerLRScheduler:
        hparams = self._settings
        # A tied parameter is found in each module that holds it; the first one, the embedding, decides.
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        grouped: set[nn.Parameter] = set()
        for module in self.modules():
            scale = hparams.embedding_lr_scale if isinstance(module, nn.Embedding) else 1.0
            for name, parameter in module.named_parameters(recurse=False):
                # By module and name: FSDP leaves parameters no shape to tell a matrix from a vector.
                is_vector = name == "bias" or "norm" in type(module).__name__.lower()
                if parameter.requires_grad and parameter not in grouped:
                    grouped.add(parameter)
                    decay = 0.0 if is_vector else hparams.weight_decay
                    groups.setdefault((scale, decay), []).append(parameter)
        optimizer = torch.optim.AdamW(
            [
                {"params": parameters, "lr": hparams.learning_rate * scale, "weight_decay": decay}
                for (scale, decay), parameters in groups.items()
            ],
            betas=hparams.betas,
            fused=all(parameter.is_cuda for parameter in grouped),
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._learning_rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _learning_rate_factor(self, step: int) -> float:
        warmup, floor = self._settings.warmup_steps, self._settings.min_lr_ratio
        if step < warmup:
            return (step + 1) / (warmup + 1)
        total = max(1, int(self.trainer.estimated_stepping_batches) - warmup)
        progress = min(1.0, (step - warmup) / total)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    @torch.no_grad()
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Continues prompts of one length.

        Args:
            batch: ``input_ids`` of shape ``[batch_size, seq_len]``.
            batch_idx: Unused.

        Returns:
            ``[batch_size, seq_len + new tokens]``, the prompts with their continuations.
        """
        sampling = {"do_sample": True, "temperature": self._settings.temperature} if self._settings.temperature else {}
        generate = cast(Callable[..., Tensor], self.model.generate)  # transformers does not type it
        return generate(
            batch["input_ids"],
            attention_mask=torch.ones_like(batch["input_ids"]),
            max_new_tokens=self._settings.max_new_tokens,
            use_cache=True,
            **({"do_sample": False} | sampling),
        )
