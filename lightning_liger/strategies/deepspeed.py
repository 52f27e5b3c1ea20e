"""``liger_deepspeed_stage_2`` and ``_3``: DeepSpeed with fused kernels, for Trainer and Fabric, on GPUs and CPUs."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import lightning.fabric.strategies.deepspeed as fabric_deepspeed
import lightning.pytorch.strategies.deepspeed as pytorch_deepspeed
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from transformers.integrations.deepspeed import (
    is_deepspeed_zero3_enabled,
    set_hf_deepspeed_config,
    unset_hf_deepspeed_config,
)
from typing_extensions import override

from lightning_liger.patching.apply import KernelChoice
from lightning_liger.strategies.common import CommonStrategy
from lightning_liger.strategies.fabric import FabricStrategy
from lightning_liger.strategies.parts.head_units import gather_heads
from lightning_liger.strategies.parts.visible_logits import ALL_TENSORS
from lightning_liger.strategies.precision import OnNonfiniteGrad
from lightning_liger.strategies.trainer import TrainerStrategy
from lightning_liger.training.protocol import Engine

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class _AnyDevice(CommonStrategy):
    """Lets DeepSpeed train on CPUs, and rules see parameters that it partitions. A mixin for both strategies."""

    config: Any
    parallel_devices: Any
    zero_stage_3: Any
    _lightnings: Any
    """Lightning's strategy, whose set-up insists on CUDA."""

    def __init__(self, kernels: KernelChoice = "auto", **kwargs: Any) -> None:
        if find_spec("deepspeed") is None:
            raise ModuleNotFoundError(
                f"{type(self).__name__} needs DeepSpeed, which is not installed:"
                " pip install 'lightning-liger[deepspeed]'"
            )
        super().__init__(kernels, **kwargs)
        self.config = copy.deepcopy(self.config)  # Lightning writes into the user's
        # With offloaded states DeepSpeed accepts no optimizer but its own, which needs a compiler.
        self.config.setdefault("zero_force_ds_cpu_optimizer", False)
        # Lightning sets this too where it makes the config: else only a few classes of optimizers are accepted.
        self.config.setdefault("zero_allow_untested_optimizer", True)
        if self.zero_stage_3 and self.fp8:
            raise ValueError(
                f"fp8={self.fp8!r} is not supported with DeepSpeed's stage 3, which frees weights that backward"
                " multiplies by: use stage=2, or strategy='liger_fsdp'"
            )
        self._activations.layers_communicate = self.zero_stage_3  # which gathers parameters in each forward
        if compiled := self._activations.compilation.name:
            raise ValueError(f"{compiled} is not supported under DeepSpeed, which hooks into the modules of layers")
        self._checkpoints.writes_itself = True
        self._checkpoints.classes = _classes_in_checkpoints

    @property
    def root_device(self) -> torch.device:
        device: torch.device = super().root_device  # type: ignore[misc]  # of the next class
        return torch.device("cpu", 0) if device.type == "cpu" else device  # DeepSpeed asks for an index

    def setup_environment(self) -> None:
        """Raises RuntimeError if DeepSpeed found another kind of device than Lightning."""
        from deepspeed.accelerator import get_accelerator

        devices, found = self.parallel_devices or [], get_accelerator().device_name()
        wanted = {device.type for device in devices}
        if wanted - {found}:
            raise RuntimeError(
                f"accelerator and devices choose {sorted(wanted)}, but DeepSpeed has chosen {found!r}: set the"
                f" environment variable DS_ACCELERATOR to one of {sorted(wanted)} before the program starts"
            )
        if found == "cpu":
            self.parallel_devices = [torch.device("cpu", index) for index in range(len(devices))]
        super(self._lightnings, self).setup_environment()  # type: ignore[misc]

    @override
    def _final_parameters(self, model: Module) -> AbstractContextManager[None]:
        return _whole_parameters(model, self.config, self.root_device)


class LigerDeepSpeedStrategy(_AnyDevice, TrainerStrategy, pytorch_deepspeed.DeepSpeedStrategy):
    """Lightning's :class:`~lightning.pytorch.strategies.DeepSpeedStrategy` with fused kernels and a fused loss.

    Also runs on CPUs (over gloo). With ``gradient_clip_val`` the norm over all ranks before clipping is logged as
    ``grad_norm``. Hugging Face models that ``configure_model`` builds with ``from_config`` or ``from_pretrained`` are
    initialized and loaded under ZeRO-3 too; those that call a model's class themselves are not initialized by
    transformers there.

    Args:
        kernels: As in :class:`~lightning_liger.LigerFSDPStrategy`.
        on_nonfinite_grad: Only ``"ignore"``: DeepSpeed itself skips steps that overflow in fp16.
        context_parallel_size: Only 1.
        **kwargs: ``activation_checkpointing``, ``memory_budget`` and ``fault_tolerance`` as in
            :class:`~lightning_liger.LigerFSDPStrategy`; others as in Lightning's strategy.

    Raises:
        ModuleNotFoundError: If DeepSpeed is not installed.
        ValueError: For an unknown kernel, ``on_nonfinite_grad`` other than ``"ignore"`` (DeepSpeed clips by itself) and
            ``context_parallel_size`` other than 1.
    """

    strategy_name = "liger_deepspeed"
    engine: "_DeepSpeedGradients"
    _lightnings = pytorch_deepspeed.DeepSpeedStrategy

    def __init__(
        self,
        kernels: KernelChoice = "auto",
        on_nonfinite_grad: OnNonfiniteGrad = "ignore",
        context_parallel_size: int = 1,
        **kwargs: Any,
    ) -> None:
        for name, value, neutral, instead in (
            ("on_nonfinite_grad", on_nonfinite_grad, "ignore", "DeepSpeed itself skips steps that overflow in fp16"),
            ("context_parallel_size", context_parallel_size, 1, "use 'liger_fsdp' or 'liger_ddp'"),
        ):
            if value != neutral:
                name = f"{type(self).__name__} does not support {name}"
                raise ValueError(f"{name}={value!r}, only {neutral!r}: {instead}")
        super().__init__(kernels, **kwargs)
        self.engine = _DeepSpeedGradients(self)
        # DeepSpeed's throughput logs alone use it; Lightning's own guess fails with loaders without a batch sampler.
        self.config.setdefault("train_micro_batch_size_per_gpu", 1)

    @override
    def _control_plugin(self, plugin: Any) -> None:
        """Leaves the plugin alone: DeepSpeed clips by itself."""

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        with super().model_sharded_context(), _announced(self):
            yield

    @override
    def init_deepspeed(self) -> None:
        super().init_deepspeed()
        _expose_lazy_logits(self.deepspeed_engine)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        if self.lightning_module.automatic_optimization:
            kwargs["scale_wrt_gas"] = False  # Lightning has divided by the number of micro-batches
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        num_steps = self.deepspeed_engine.global_steps
        with self.engine.scale_for_one_step():
            result = super().optimizer_step(*args, **kwargs)
        assert self.lightning_module is not None
        norm = self.deepspeed_engine.get_global_grad_norm()
        if norm is not None and self.deepspeed_engine.global_steps > num_steps and self.config["gradient_clipping"]:
            self.lightning_module.log("grad_norm", float(norm), on_step=True, on_epoch=False)
        return result


class _DeepSpeedGradients(Engine):
    """The gradients that DeepSpeed has in its own buffers."""

    strategy: LigerDeepSpeedStrategy
    _loss_scales: tuple[float, float] | None = None

    @property
    @override
    def scales_gradients(self) -> bool:
        """Whether DeepSpeed's optimizer divides gradients by a loss scale; those of ZeRO 2 and 3 do."""
        return hasattr(type(getattr(self.strategy.model, "optimizer", None)), "loss_scale")

    @override
    def micro_batch_index(self) -> int:
        engine = self.strategy.deepspeed_engine
        return engine.micro_steps % engine.gradient_accumulation_steps()

    @override
    def should_accumulate(self) -> bool:
        return not self.strategy.deepspeed_engine.is_gradient_accumulation_boundary()

    @override
    def scale_gradients(self, parameters: Iterable[Parameter], factor: Tensor) -> None:
        """Multiplies the gradients that the next step uses by ``factor``, before they are clipped.

        They are in DeepSpeed's buffers, which its step divides by the loss scale: that is changed for this step.
        """
        optimizer = self.strategy.deepspeed_engine.optimizer
        before = optimizer.loss_scale
        optimizer.loss_scale = before / factor.item()
        self._loss_scales = before, optimizer.loss_scale

    @contextmanager
    def scale_for_one_step(self) -> Iterator[None]:
        """Restores the loss scale after an optimizer step, in which it may have changed."""
        try:
            yield
        finally:
            if self._loss_scales is not None:
                before, during = self._loss_scales
                self._loss_scales = None
                optimizer = self.strategy.deepspeed_engine.optimizer
                optimizer.loss_scale = before * (optimizer.loss_scale / during)


class FabricLigerDeepSpeedStrategy(_AnyDevice, FabricStrategy, fabric_deepspeed.DeepSpeedStrategy):
    """:class:`LigerDeepSpeedStrategy` for Fabric; takes the same arguments.

    DeepSpeed clips gradients by norm if ``config`` has ``gradient_clipping``.
    """

    _lightnings = fabric_deepspeed.DeepSpeedStrategy

    def __init__(self, kernels: KernelChoice = "auto", **kwargs: Any) -> None:
        super().__init__(kernels, **kwargs)
        self.config.setdefault("gradient_clipping", 0.0)  # DeepSpeed's own default is 1

    @contextmanager
    @override
    def module_sharded_context(self) -> Iterator[None]:
        with super().module_sharded_context(), _announced(self):
            yield

    @override
    def setup_module(self, module: Module) -> Any:
        engine = super().setup_module(module)
        _expose_lazy_logits(engine)
        return engine

    @override
    def setup_module_and_optimizers(self, module: Module, *args: Any, **kwargs: Any) -> Any:
        engine, *others = super().setup_module_and_optimizers(self._prepare(module), *args, **kwargs)
        _expose_lazy_logits(engine)
        return engine, *others


def _classes_in_checkpoints() -> tuple[type, ...]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address


@contextmanager
def _announced(strategy: Any) -> Iterator[None]:
    """Tells transformers that parameters are partitioned as modules are made, under ZeRO-3."""
    if not strategy.zero_stage_3 or is_deepspeed_zero3_enabled():
        yield
        return
    config = _ZeroConfig(config=strategy.config, is_zero3=lambda: True)  # transformers refers to it weakly
    set_hf_deepspeed_config(config)
    try:
        yield
    finally:
        unset_hf_deepspeed_config()


def _expose_lazy_logits(engine: "DeepSpeedEngine") -> None:
    """Shows the tensors of lazy logits to DeepSpeed's hooks.

    ZeRO-3 frees a module's parameters after its forward, gathers them again when backward reaches the tensors that it
    returned, and frees them when backward reaches those that it was given: when the head's gradient arrives, its
    parameter must be whole.
    """
    heads = set(gather_heads(engine.module))
    for module in engine.module.modules():
        if not heads.isdisjoint(module.modules()):
            ALL_TENSORS.expose(module)


class _ZeroConfig(SimpleNamespace):
    """What transformers reads to build partitioned models; a plain namespace has no weak references."""


@contextmanager
def _whole_parameters(model: Module, config: Any, device: torch.device) -> Iterator[None]:
    """Shows the parameters of ``model`` as the engine will have them: not partitioned, in its dtype, on ``device``.

    Rules look at their shapes, dtypes and devices, and verify replacements with these. They take no memory.
    """
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        model.to(device)  # Lightning moved it to the CPU after an earlier stage
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = next((each for name, each in dtypes.items() if config.get(name, {}).get("enabled")), None)

    def stand_in(parameter: Parameter) -> Parameter:
        cast = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        number = torch.zeros((), dtype=cast, device=device)
        return Parameter(number.expand(getattr(parameter, "ds_shape", parameter.shape)), parameter.requires_grad)

    stand_ins: Any = {parameter: stand_in(parameter) for parameter in model.parameters()}
    own = [(module, module._parameters) for module in model.modules()]
    try:
        for module, parameters in own:
            module._parameters = {name: stand_ins.get(parameter) for name, parameter in parameters.items()}
        yield
    finally:
        for module, parameters in own:
            module._parameters = parameters
