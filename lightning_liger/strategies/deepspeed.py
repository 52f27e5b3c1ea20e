"""``liger_deepspeed_stage_2`` and ``_3``: DeepSpeed with fused kernels, for Trainer and Fabric, on GPUs and CPUs."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
from lightning_liger.strategies.parts.activations import FabricActivations, TrainerActivations
from lightning_liger.strategies.parts.adoption import FabricKernels, TrainerKernels
from lightning_liger.strategies.parts.arguments import Refused, refuse
from lightning_liger.strategies.parts.fault_tolerance import FabricFaultTolerance, TrainerFaultTolerance
from lightning_liger.strategies.parts.head_units import gather_heads
from lightning_liger.strategies.parts.materialization import FabricMaterialization, TrainerMaterialization
from lightning_liger.strategies.parts.visible_logits import ALL_TENSORS
from lightning_liger.strategies.precision import EvaluatedPrecision, OnNonfiniteGrad

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    _Strategy = Any  # Lightning's for the Trainer or for Fabric, which have no common base
else:
    _Strategy = object

_REFUSED: Refused = {
    "on_nonfinite_grad": ("ignore", "DeepSpeed itself skips steps that overflow in fp16, in no other precision"),
    "context_parallel_size": (1, "use 'liger_fsdp', 'liger_model_parallel' or 'liger_ddp'"),
}


class _FusedDeepSpeed(_Strategy):
    """Applies kernels under DeepSpeed. A mixin for strategies of Trainer and Fabric.

    Args:
        kernels: ``"auto"``, ``"none"``, a name, a list of names or a dict of changes to ``"auto"``; see
            :func:`~lightning_liger.apply_liger_kernels`.
        on_nonfinite_grad: Only ``"ignore"``: DeepSpeed skips steps that overflow in fp16 itself.
        context_parallel_size: Only 1.
    """

    _lightnings_class: Any
    config: Any
    parallel_devices: list[torch.device] | None

    def __init__(
        self,
        kernels: KernelChoice = "auto",
        on_nonfinite_grad: OnNonfiniteGrad = "ignore",
        context_parallel_size: int = 1,
        **kwargs: Any,
    ) -> None:
        if not fabric_deepspeed._DEEPSPEED_AVAILABLE:
            raise ModuleNotFoundError(
                f"{type(self).__name__} needs DeepSpeed, which is not installed: "
                "pip install 'lightning-liger[deepspeed]'"
            )
        refuse(
            type(self).__name__,
            _REFUSED,
            on_nonfinite_grad=on_nonfinite_grad,
            context_parallel_size=context_parallel_size,
        )
        super().__init__(kernels=kernels, **kwargs)
        self.config = copy.deepcopy(self.config)  # Lightning writes into the user's
        # With offloaded states DeepSpeed accepts no optimizer but its own, which needs a compiler.
        self.config.setdefault("zero_force_ds_cpu_optimizer", False)
        # Lightning sets this too where it makes the config: else only a few classes of optimizers are accepted.
        self.config.setdefault("zero_allow_untested_optimizer", True)

    @property
    def _classes_in_checkpoints(self) -> tuple[type, ...]:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        return DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address

    @property
    def root_device(self) -> torch.device:
        """With an index, which DeepSpeed asks for and a CPU does not have."""
        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device

    def setup_environment(self) -> None:
        """As Lightning's, but lets DeepSpeed train on CPUs.

        Raises:
            RuntimeError: If DeepSpeed found another kind of device than Lightning.
        """
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
        # Of the class after Lightning's DeepSpeedStrategy, which insists on CUDA; mixins in between are skipped too.
        super(self._lightnings_class, self).setup_environment()

    def _precision_settings(self) -> dict[str, Any]:
        return {**super()._precision_settings(), "shown_parameters": self._show_parameters}

    @property
    def _runs_layers_together(self) -> bool:
        return self.zero_stage_3 or super()._runs_layers_together  # stage 3 gathers parameters in each forward

    def _show_parameters(self, model: Module) -> AbstractContextManager[None]:
        _bring_back(model, self.root_device)
        return _whole_parameters(model, self._engine_dtype(), self.root_device)

    def _engine_dtype(self) -> torch.dtype | None:
        """The dtype that the engine casts its module to, None if it does not cast."""
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            if self.config.get(name, {}).get("enabled"):
                return dtype
        return None

    @contextmanager
    def _sharded_from_the_start(self, context: Any) -> Iterator[None]:
        """``context``, in which ZeRO-3 partitions parameters as modules are made, also announced to transformers."""
        if not self.zero_stage_3 or is_deepspeed_zero3_enabled():
            with context:
                yield
            return
        config = _ZeroConfig(self.config)  # transformers refers to it weakly
        set_hf_deepspeed_config(config)
        try:
            with context:
                yield
        finally:
            unset_hf_deepspeed_config()

    def _expose_lazy_logits(self, engine: "DeepSpeedEngine") -> None:
        """Shows the tensors of lazy logits to DeepSpeed's hooks.

        ZeRO-3 frees a module's parameters after its forward, gathers them again when backward reaches the tensors that
        it returned, and frees them when backward reaches those that it was given: when the head's gradient arrives, its
        parameter must be whole.
        """
        heads = set(gather_heads(engine.module))
        for module in engine.module.modules():
            if not heads.isdisjoint(module.modules()):
                ALL_TENSORS.expose(module)


class LigerDeepSpeedStrategy(
    _FusedDeepSpeed,
    TrainerFaultTolerance,
    TrainerActivations,
    TrainerKernels,
    TrainerMaterialization,
    pytorch_deepspeed.DeepSpeedStrategy,
):
    """Lightning's :class:`~lightning.pytorch.strategies.DeepSpeedStrategy` with fused kernels and a fused loss.

    Also runs on CPUs (over gloo). With ``gradient_clip_val`` the norm over all ranks before clipping is logged as
    ``grad_norm``. Hugging Face models that ``configure_model`` builds with ``from_config`` or ``from_pretrained`` are
    initialised and loaded under ZeRO-3 too; those that call a model's class themselves are not initialised by
    transformers there.

    Args:
        kernels: ``"auto"``, ``"none"``, a name, a list of names or a dict of changes to ``"auto"``; see
            :func:`~lightning_liger.apply_liger_kernels`.
        activation_checkpointing: As in :class:`~lightning_liger.LigerFSDPStrategy`.
        memory_budget: As in :class:`~lightning_liger.LigerFSDPStrategy`.
        fault_tolerance: As in :class:`~lightning_liger.LigerFSDPStrategy`.
        **kwargs: As in Lightning's strategy, such as ``stage``, ``offload_optimizer`` or ``config``.

    Raises:
        ModuleNotFoundError: If DeepSpeed is not installed.
        ValueError: For an unknown kernel, ``on_nonfinite_grad`` other than ``"ignore"`` (DeepSpeed clips by itself) and
            ``context_parallel_size`` other than 1.
    """

    strategy_name = "liger_deepspeed"
    saves_folders = True
    _reads_by_itself = True
    _precision_mixin = EvaluatedPrecision  # DeepSpeed clips by itself
    _overridden = ("_auto_select_batch_size", "_setup_model_and_optimizer", "_initialize_deepspeed_inference")
    _lightnings_class = pytorch_deepspeed.DeepSpeedStrategy

    def __init__(self, kernels: KernelChoice = "auto", **kwargs: Any) -> None:
        super().__init__(kernels, **kwargs)
        self._loss_scales: tuple[float, float] | None = None

    @override
    def _auto_select_batch_size(self) -> int:
        # DeepSpeed's throughput logs alone use it; Lightning's fails with loaders that have no batch sampler.
        return 1

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        with self._sharded_from_the_start(super().model_sharded_context()):
            yield

    @override
    def _setup_model_and_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        engine, optimizer = super()._setup_model_and_optimizer(*args, **kwargs)
        self._expose_lazy_logits(engine)
        return engine, optimizer

    @override
    def _initialize_deepspeed_inference(self, model: Module) -> None:
        _bring_back(model, self.root_device)
        super()._initialize_deepspeed_inference(model)
        self._expose_lazy_logits(self.deepspeed_engine)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        if self.lightning_module.automatic_optimization:
            kwargs["scale_wrt_gas"] = False  # Lightning has divided by the number of micro-batches
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        num_steps = self.deepspeed_engine.global_steps
        try:
            result = super().optimizer_step(*args, **kwargs)
        finally:
            self._restore_loss_scale()
        assert self.lightning_module is not None
        norm = self.deepspeed_engine.get_global_grad_norm()
        if norm is not None and self.deepspeed_engine.global_steps > num_steps and self.config["gradient_clipping"]:
            self.lightning_module.log("grad_norm", float(norm), on_step=True, on_epoch=False)
        return result

    # For the mean over tokens

    @property
    def scales_gradients(self) -> bool:
        """Whether DeepSpeed's optimizer divides gradients by a loss scale; those of ZeRO 2 and 3 do."""
        return hasattr(type(getattr(self.model, "optimizer", None)), "loss_scale")

    def micro_batch_index(self) -> int:
        return self.deepspeed_engine.micro_steps % self.deepspeed_engine.gradient_accumulation_steps()

    def should_accumulate(self) -> bool:
        return not self.deepspeed_engine.is_gradient_accumulation_boundary()

    def scale_gradients(self, parameters: Iterable[Parameter], factor: Tensor) -> None:
        """Multiplies the gradients that the next step uses by ``factor``, before they are clipped.

        They are in DeepSpeed's buffers, which its step divides by the loss scale: that is changed for this step.
        """
        optimizer = self.deepspeed_engine.optimizer
        before = optimizer.loss_scale
        optimizer.loss_scale = before / factor.item()
        self._loss_scales = before, optimizer.loss_scale

    def _restore_loss_scale(self) -> None:
        if self._loss_scales is None:
            return
        before, during = self._loss_scales
        self._loss_scales = None
        optimizer = self.deepspeed_engine.optimizer
        optimizer.loss_scale = before * (optimizer.loss_scale / during)  # which the step may have changed


class FabricLigerDeepSpeedStrategy(
    _FusedDeepSpeed,
    FabricFaultTolerance,
    FabricActivations,
    FabricKernels,
    FabricMaterialization,
    fabric_deepspeed.DeepSpeedStrategy,
):
    """:class:`LigerDeepSpeedStrategy` for Fabric; takes the same arguments.

    DeepSpeed clips gradients by norm if ``config`` has ``gradient_clipping``.
    """

    _writes_by_itself = True
    _overridden = ("_initialize_engine",)
    _lightnings_class = fabric_deepspeed.DeepSpeedStrategy

    def __init__(self, kernels: KernelChoice = "auto", **kwargs: Any) -> None:
        super().__init__(kernels, **kwargs)
        self.config.setdefault("gradient_clipping", 0.0)  # DeepSpeed's own default is 1

    @override
    def module_sharded_context(self) -> Any:
        return self._sharded_from_the_start(super().module_sharded_context())

    @override
    def _initialize_engine(self, *args: Any, **kwargs: Any) -> Any:
        engine, *others = super()._initialize_engine(*args, **kwargs)
        self._expose_lazy_logits(engine)
        return engine, *others


def _bring_back(model: Module, device: torch.device) -> None:
    """Undoes Lightning's move to the CPU after an earlier stage; DeepSpeed moves only what is not partitioned."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        model.to(device)


class _ZeroConfig:
    """The configuration that transformers reads to build models whose parameters are partitioned as they are made."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def is_zero3(self) -> bool:
        return True


@contextmanager
def _whole_parameters(model: Module, dtype: torch.dtype | None, device: torch.device) -> Iterator[None]:
    """Shows the parameters of ``model`` as the engine will have them: not partitioned, in ``dtype``, on ``device``.

    Rules look at their shapes, dtypes and devices, and verify replacements with these. They take no memory.
    """
    stand_ins: dict[Parameter, Parameter] = {}

    def stand_in(parameter: Parameter) -> Parameter:
        if parameter not in stand_ins:
            cast = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
            number = torch.zeros((), dtype=cast, device=device)
            shape = getattr(parameter, "ds_shape", parameter.shape)
            stand_ins[parameter] = Parameter(number.expand(shape), parameter.requires_grad)
        return stand_ins[parameter]

    own = [(module, module._parameters) for module in model.modules()]
    try:
        for module, parameters in own:
            module._parameters = {
                name: None if parameter is None else stand_in(parameter) for name, parameter in parameters.items()
            }
        yield
    finally:
        for module, parameters in own:
            module._parameters = parameters
