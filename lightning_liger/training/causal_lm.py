"""A finished LightningModule for a Hugging Face causal LM, so that a yaml file is a whole program."""

import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from liger_ops.arguments import check_bool, check_choice, check_integer, check_number, wrong_type, wrong_value
from liger_ops.optim import AdamW
from liger_ops.optim.moments import STATE_DTYPES
from lightning_liger.hub import checkpoint_folder, download_weights
from lightning_liger.losses.sft import SFTLoss
from lightning_liger.training.architecture import auto_class, build_config, check_vocabulary
from lightning_liger.training.batches import check_prompts
from lightning_liger.training.lora import (
    add_adapters,
    check_lora,
    check_quantization,
    fit_to_strategy,
    float32_tables,
    needs_weights,
)
from lightning_liger.training.mixin import LigerLMMixin
from lightning_liger.training.protocol import engine_of
from lightning_liger.weights.pretrained import load_pretrained, naming_damaged

_ADAPTERS = "liger_adapters"
"""The names of saved adapters in a checkpoint, of which strategies that shard have taken the state dict."""
_STATE_SPACE = ("A_log", "D", "dt_bias")
"""Parameters of Mamba and its variants that must not decay; some are matrices."""


def needs_float32_moments(module: nn.Module) -> bool:
    """Whether AdamW's moments of a module's own parameters stay in float32 next to others in 8 bits.

    Most rows of embeddings have no gradient in most steps, and few tokens turn on how routers tell experts apart.
    """
    return isinstance(module, nn.Embedding) or "router" in type(module).__name__.lower()


class LigerCausalLM(LigerLMMixin, L.LightningModule):
    """A causal language model with AdamW and a warm-up and cosine schedule.

    Under ``liger_fsdp`` and ``liger_model_parallel`` the model need not fit on one device: it gets its weights when it
    is sharded, see :func:`~lightning_liger.load_pretrained`.

    Args:
        pretrained: Folder of a Hugging Face checkpoint to start from, or ``owner/name`` of one on the Hub. None starts
            from random weights.
        model_type: Architecture of a model with random weights, as in a ``config.json`` ("llama", "qwen3", ...).
        config: The architecture's settings where they differ from its defaults; with ``pretrained``, what to change.
        attn_implementation: Attention that transformers uses, such as ``"sdpa"`` or ``"flash_attention_2"``; None
            leaves the choice to transformers.
        learning_rate: Peak learning rate.
        embedding_lr_scale: Factor of the learning rate for the input embeddings. With random weights, 10 to 30 lets a
            small model distinguish tokens much sooner; 1 is the usual choice for large and for pretrained ones.
        weight_decay: Decay of matrices; vectors (norms, biases) and the parameters of state spaces (``A_log``, ``D``,
            ``dt_bias``) do not decay.
        betas: AdamW's averaging factors.
        state_dtype: Of AdamW's moments: None for the parameters', ``"float32"``, ``"bfloat16"``, or ``"8bit"``, where
            those of embeddings, routers and vectors are float32; see :class:`~liger_ops.optim.AdamW`.
        stochastic_rounding: Whether AdamW rounds bfloat16 parameters stochastically, for ``precision="bf16-true"``.
        warmup_steps: Steps in which the learning rate rises to its peak.
        num_training_steps: Optimizer steps after which the learning rate has decayed, warm-up included. None
            takes the Trainer's estimate. If that is unknown (data without a length, or
            ``max_epochs=-1`` with ``max_time``), the learning rate stays at its peak, with a warning.
        min_lr_ratio: Final share of the peak learning rate; 1 keeps the learning rate constant.
        loss_normalization: ``"tokens"``, the mean over all target tokens of an optimizer step, or ``"micro_batch"``,
            the mean of the micro-batches' means.
        max_new_tokens: Tokens that ``predict`` adds to a prompt.
        temperature: Of sampling in ``predict``; 0 decodes greedily.
        loss_type: ``"nll"``, cross entropy, or ``"dft"``, which weights tokens by their probability: dynamic
            fine-tuning, arXiv:2508.05629.
        lora: Adapters that are trained instead of the model: arguments of peft's ``LoraConfig``, such as ``{"r": 16,
            "alpha": 32, "target_modules": "all-linear"}``, where ``alpha`` and ``dropout`` are short for ``lora_alpha``
            and ``lora_dropout``; ``target_parameters`` adapts experts; None trains all parameters. Checkpoints hold the
            whole model; ``export`` merges the adapters into its weights.
        revision: Branch, tag or commit of ``pretrained`` on the Hub; None for its main branch.
        quantization: How the weights of ``pretrained`` under ``lora`` are quantized as they are loaded: arguments of
            transformers' ``BitsAndBytesConfig``, such as ``{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}`` for
            QLoRA (arXiv:2305.14314), or ``{"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig"}``. On one
            device, under DDP, and FSDP2 without 8 bits of bitsandbytes; with 4 bits of bitsandbytes also under FSDP.
            Checkpoints hold the adapters; ``export`` merges them into the weights before quantization.

    Raises:
        ConnectionError: If ``pretrained`` on the Hub is not in the local cache, and the Hub cannot be reached.
        FileNotFoundError: If ``pretrained`` has no ``config.json``, or there is no such repository or revision.
        PermissionError: If ``pretrained`` is gated, and the user of the token may not read it.
        ModuleNotFoundError: If ``lora`` is given and peft is not installed, or the package of ``quantization``.
        TypeError: For an argument of a wrong type.
        ValueError: For an unknown architecture, a setting that it does not have, or an argument out of its range.
    """

    model: PreTrainedModel

    def __init__(
        self,
        pretrained: str | None = None,
        model_type: str = "llama",
        config: dict[str, Any] | None = None,
        attn_implementation: str | None = None,
        learning_rate: float = 3e-4,
        embedding_lr_scale: float = 1.0,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int = 0,
        min_lr_ratio: float = 0.1,
        loss_normalization: Literal["tokens", "micro_batch"] = "tokens",
        max_new_tokens: int = 64,
        temperature: float = 0.8,
        num_training_steps: int | None = None,
        loss_type: SFTLoss = "nll",
        lora: dict[str, Any] | None = None,
        state_dtype: Literal["float32", "bfloat16", "8bit"] | None = None,
        stochastic_rounding: bool = False,
        revision: str | None = None,
        quantization: dict[str, Any] | None = None,
    ) -> None:
        self.loss_normalization = loss_normalization
        self.loss_type = loss_type
        super().__init__()
        self.save_hyperparameters()
        paths = {name: os.fspath(value) for name, value in self.hparams.items() if isinstance(value, os.PathLike)}
        self.hparams.update(paths)  # checkpoints hold plain objects
        for name in ("learning_rate", "weight_decay", "temperature"):
            check_number(name, self.hparams[name], at_least=0)
        check_number("embedding_lr_scale", embedding_lr_scale, above=0)
        check_number("min_lr_ratio", min_lr_ratio, at_least=0, at_most=1)
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise wrong_type("betas", "two numbers of at least 0 and below 1", betas)
        for index, beta in enumerate(betas):
            check_number(f"betas[{index}]", beta, at_least=0, below=1)
        check_choice("state_dtype", state_dtype, tuple(STATE_DTYPES))
        check_bool("stochastic_rounding", stochastic_rounding)
        check_integer("warmup_steps", warmup_steps, at_least=0)
        check_integer("max_new_tokens", max_new_tokens, at_least=1)
        check_integer("num_training_steps", num_training_steps, at_least=1, optional=True)
        if num_training_steps is not None and num_training_steps < warmup_steps:
            raise wrong_value("num_training_steps", f"at least warmup_steps={warmup_steps}", num_training_steps)
        if attn_implementation is not None and not (isinstance(attn_implementation, str) and attn_implementation):
            raise wrong_type("attn_implementation", "a name such as 'sdpa', or None", attn_implementation)
        if "/" in (attn_implementation or ""):  # a kernel of the Hub, which a checkpoint's hyperparameters could name
            raise wrong_value("attn_implementation", "a name without '/', as no code is loaded", attn_implementation)
        check_lora(lora)
        if check_quantization(quantization, lora, pretrained) is not None:
            self.strict_loading = False  # checkpoints hold the adapters only
        if lora is not None and needs_weights(lora):
            self._device_before_sharding = torch.device("cpu")
        self._folder = checkpoint_folder("pretrained", pretrained, revision)
        self.config = build_config(self._folder, model_type, config)
        self._undecayed: set[tuple[nn.Module, str]] = set()

    def prepare_data(self) -> None:
        """Downloads the weights of ``pretrained`` from the Hub, on one process of each node, as Lightning does it."""
        if self._folder is not None:
            download_weights("pretrained", self._settings.pretrained, self._folder)

    def setup(self, stage: str) -> None:
        check_vocabulary(self.config, getattr(getattr(self.trainer, "datamodule", None), "text_tokenizer", None))

    def on_predict_start(self) -> None:
        super().on_predict_start()
        self.setup("predict")  # the tokenizer may come with the checkpoint

    def configure_model(self) -> None:
        """Builds the model once: on the meta device for strategies that shard it there, else where it will train."""
        if getattr(self, "model", None) is not None:
            return
        self.model = self._build_model()
        self._configure_other_models()
        if self._settings.lora is not None:
            self.model = add_adapters(self.model, self._settings.lora)
        if self._quantizes:
            self._start_quantized()
        # Here, because engines leave parameters no shape to tell a vector from a matrix.
        self._undecayed = {
            (module, name)
            for module in self.model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if len(getattr(parameter, "ds_shape", parameter.shape)) < 2
        }
        if self._attached_trainer is not None:  # an exported config keeps what it was
            self.model.config.use_cache = False
        self.train()

    def _configure_other_models(self) -> None:
        """Makes further modules from ``self.model``, which has no adapters yet."""

    def _build_model(self) -> PreTrainedModel:
        """A model with the weights of ``pretrained``, or random ones."""
        LigerCausalLM.prepare_data(self)  # without a Trainer nothing has called it
        folder, trainer = self._folder, self._attached_trainer
        device = torch.get_default_device() if trainer is None else trainer.strategy.root_device
        if trainer is not None and engine_of(trainer).initializes_on_meta:
            device = self._device_before_sharding
        settings: dict[str, Any] = {"dtype": torch.get_default_dtype(), "trust_remote_code": False}
        if self._settings.attn_implementation is not None:
            settings["attn_implementation"] = self._settings.attn_implementation
        if self._quantizes:
            if trainer is not None:  # also where it shards then: whole weights are quantized
                device = trainer.strategy.root_device
            strategy = None if trainer is None else trainer.strategy
            quantization = fit_to_strategy(self._settings.quantization, strategy, self._is_sharded)
            config = check_quantization(quantization, self._settings.lora, folder)
            settings |= {"quantization_config": config, "device_map": {"": device}}
        with device, float32_tables() if self._quantizes else nullcontext():
            if folder is not None and device.type != "meta":
                with naming_damaged(folder):
                    return auto_class(self.config).from_pretrained(
                        folder, config=self.config, local_files_only=True, **settings
                    )
            model: PreTrainedModel = auto_class(self.config).from_config(self.config, **settings)
        if device.type == "meta" and folder is not None:
            load_pretrained(model, folder)
        elif device.type == "meta" and not all(parameter.is_meta for parameter in model.parameters()):
            # Their constructors ignore torch's device, and their values would never be set.
            raise ValueError(
                f"model_type={self.config.model_type!r} cannot be built on the meta device with random weights, as"
                " strategies that shard do: set pretrained, or use strategy='liger_ddp'"
            )
        return model

    _device_before_sharding = torch.device("meta")
    """Where models are built for strategies that shard them."""

    quantizes_base = True
    """False makes :meth:`configure_model` ignore ``quantization``, as an export does."""

    @property
    def _quantizes(self) -> bool:
        return self.quantizes_base and self._settings.quantization is not None

    @property
    def _is_sharded(self) -> bool:
        """Whether one of our strategies will shard the model."""
        return self._attached_trainer is not None and engine_of(self._attached_trainer).initializes_on_meta

    def _start_quantized(self) -> None:
        for module in self.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                vars(module)["support_avx512bf16_for_cpu"] = False  # repacks weights in validation, for good
        strategy = getattr(self._attached_trainer, "strategy", None)
        if self._is_sharded or isinstance(strategy, DDPStrategy):
            whole: list[str] = []
            parameter: Any
            for name, parameter in self.named_parameters():
                if parameter.requires_grad:  # of what each rank has drawn it keeps a shard
                    dist.broadcast(parameter.detach(), 0)
                elif type(parameter).__module__.startswith("torchao."):  # no engine can split or copy it
                    whole.append(name)
                    for part in parameter.__tensor_flatten__()[0]:  # in bytes, as gloo takes no float8
                        dist.broadcast(getattr(parameter, part).view(-1).view(torch.uint8), 0)
            if whole:
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, whole)
        if isinstance(strategy, ModelParallelStrategy):
            self.register_state_dict_post_hook(_keep_adapters)  # sharded checkpoints load what a state dict has

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self._settings.quantization is not None:
            _keep_adapters(self, checkpoint["state_dict"])
            checkpoint[_ADAPTERS] = sorted(_trained_names(self))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if self._settings.quantization is not None:
            saved = checkpoint["state_dict"] if "state_dict" in checkpoint else checkpoint.get(_ADAPTERS, ())
            if differ := sorted(_trained_names(self) ^ set(saved)):
                raise ValueError(f"the checkpoint must hold the adapters of the module, and nothing else, got {differ}")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        return self.model(*args, **kwargs)

    @property
    def _settings(self) -> Any:
        """The arguments of ``__init__``; Lightning types them as a mapping, whose items are attributes too."""
        return self.hparams

    def configure_optimizers(self) -> OptimizerLRScheduler:
        hparams = self._settings
        # A tied parameter is found in each module that holds it; the first one, the embedding, decides.
        groups: dict[tuple[float, int, float, str | None], list[nn.Parameter]] = {}
        grouped: set[nn.Parameter] = set()
        for module in self.modules():
            scale, warmup_steps = self._learning_rate_scale(module), self._warmup_steps(module)
            is_wide = hparams.state_dtype == "8bit" and needs_float32_moments(module)
            state_dtype = "float32" if is_wide else hparams.state_dtype
            for name, parameter in module.named_parameters(recurse=False):
                is_vector = (module, name) in self._undecayed or "norm" in type(module).__name__.lower()
                is_undecayed = is_vector or name.endswith("bias") or name in _STATE_SPACE
                if parameter.requires_grad and parameter not in grouped:
                    grouped.add(parameter)
                    decay = 0.0 if is_undecayed else hparams.weight_decay
                    groups.setdefault((scale, warmup_steps, decay, state_dtype), []).append(parameter)
        own: dict[str, Any] = {"stochastic_rounding": hparams.stochastic_rounding}
        make: Callable[..., torch.optim.Optimizer] = partial(AdamW, **own)
        # DeepSpeed knows optimizers by their class, and warns of all others.
        if isinstance(getattr(self._attached_trainer, "strategy", None), DeepSpeedStrategy):
            for name, value in (("state_dtype", hparams.state_dtype), *own.items()):
                if value:
                    raise wrong_value(name, "unset with DeepSpeed, whose checkpoints have other states", value)
            make = partial(torch.optim.AdamW, fused=all(parameter.is_cuda for parameter in grouped))
        optimizer = make(
            [
                {"params": parameters, "lr": hparams.learning_rate * scale, "weight_decay": decay}
                | ({} if state_dtype is None else {"state_dtype": state_dtype})
                for (scale, _, decay, state_dtype), parameters in groups.items()
            ],
            betas=hparams.betas,
        )
        factors: Any = [partial(self._learning_rate_factor, warmup_steps=steps) for _, steps, *_ in groups]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _learning_rate_scale(self, module: nn.Module) -> float:
        """The factor of the learning rate for the parameters of ``module`` itself."""
        return float(self._settings.embedding_lr_scale) if isinstance(module, nn.Embedding) else 1.0

    def _warmup_steps(self, module: nn.Module) -> int:
        """The steps in which the learning rate of ``module``'s own parameters rises to its peak."""
        return int(self._settings.warmup_steps)

    def _learning_rate_factor(self, step: int, warmup_steps: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        floor, total = self._settings.min_lr_ratio, self._num_training_steps
        if total is None or floor == 1:
            return 1.0
        progress = min(1.0, (step - warmup_steps) / max(1, total - warmup_steps))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    @property
    def _num_training_steps(self) -> int | None:
        """The steps of the schedule, None if nothing tells their number."""
        given: int | None = self._settings.num_training_steps
        estimated = self.trainer.estimated_stepping_batches if given is None else given
        return int(estimated) if 0 <= estimated < math.inf else None  # -1 and infinity are unknown

    def on_train_start(self) -> None:
        super().on_train_start()
        if self._settings.min_lr_ratio < 1 and self._num_training_steps is None:
            rank_zero_warn(
                "The number of training steps is unknown, so the learning rate stays at its peak after warmup_steps:"
                " set num_training_steps of LigerCausalLM, or max_steps of the Trainer, so that it decays; or"
                " min_lr_ratio=1 for a constant rate."
            )

    @torch.no_grad()
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Continues prompts of one length, ``input_ids`` of shape ``[batch_size, seq_len]``.

        Returns:
            ``[batch_size, seq_len + new tokens]``, the prompts with their continuations.
        """
        check_prompts(batch)
        temperature = self._settings.temperature
        generate = cast(Callable[..., Tensor], self.model.generate)  # transformers does not type it
        return generate(
            batch["input_ids"],
            attention_mask=torch.ones_like(batch["input_ids"]),
            max_new_tokens=self._settings.max_new_tokens,
            use_cache=True,
            **({"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}),
        )


def _trained_names(module: nn.Module) -> set[str]:
    """The names of trained parameters in state dicts: without wrappers, whose names begin with an underscore."""
    names = (name.split(".") for name, parameter in module.named_parameters() if parameter.requires_grad)
    return {".".join(part for part in parts if not part.startswith("_")) for parts in names}


def _keep_adapters(module: nn.Module, state_dict: dict[str, Any], prefix: str = "", *_: Any) -> None:
    trained = _trained_names(module)
    for name in [name for name in state_dict if name.removeprefix(prefix) not in trained]:
        del state_dict[name]
