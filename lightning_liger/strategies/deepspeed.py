"""``liger_deepspeed_stage_2`` and ``_3``: DeepSpeed with fused kernels, for Trainer and Fabric, on GPUs and CPUs."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning.fabric.strategies.deepspeed as fabric_deepspeed
import lightning.pytorch.strategies.deepspeed as pytorch_deepspeed
import torch
import torch.distributed as dist
from lightning.fabric.strategies import _StrategyRegistry
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from transformers.integrations.deepspeed import (
    is_deepspeed_zero3_enabled,
    set_hf_deepspeed_config,
    unset_hf_deepspeed_config,
)
from typing_extensions import override

from lightning_liger.lazy.logits import LazyLogits
from lightning_liger.patching.apply import KernelChoice
from lightning_liger.patching.rules import Patched
from lightning_liger.strategies.parts.kernels import FabricKernels, TrainerKernels

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_NAME = "liger_deepspeed"
_STAGES: dict[str, dict[str, Any]] = {
    "stage_2": {"stage": 2},
    "stage_2_offload": {"stage": 2, "offload_optimizer": True},
    "stage_3": {"stage": 3},
    "stage_3_offload": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
}


class _FusedDeepSpeed:
    """What the Trainer's and Fabric's strategies share; placed before Lightning's class."""

    config: Any
    parallel_devices: list[torch.device] | None
    zero_stage_3: bool
    _lightnings_class: type

    def __init__(self, kernels: KernelChoice = "auto", **kwargs: Any) -> None:
        if not fabric_deepspeed._DEEPSPEED_AVAILABLE:
            raise ModuleNotFoundError(
                f"{type(self).__name__} needs DeepSpeed, which is not installed: pip install lightning-liger[deepspeed]"
            )
        super().__init__(kernels=kernels, **kwargs)  # type: ignore[call-arg]
        self.config = copy.deepcopy(self.config)  # Lightning writes into the user's
        # With offloaded states DeepSpeed would refuse optimizers other than its own, which needs a compiler.
        self.config.setdefault("zero_force_ds_cpu_optimizer", False)
        self._hooks: list[Any] = []

    @property
    def root_device(self) -> torch.device:
        """With an index, which DeepSpeed asks for and a CPU does not have."""
        device = super().root_device  # type: ignore[misc]
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
        # What comes after Lightning's DeepSpeedStrategy, which insists on CUDA.
        super(self._lightnings_class, self).setup_environment()  # type: ignore[misc, arg-type]

    def _apply_kernels(self, model: Module) -> None:
        with _whole_parameters(model, self._engine_dtype(), self.root_device):
            super()._apply_kernels(model)  # type: ignore[misc]

    def _engine_dtype(self) -> torch.dtype | None:
        """What the engine casts its module to, None if it leaves it as it is."""
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            if self.config.get(name, {}).get("enabled"):
                return dtype
        return None

    @contextmanager
    def _sharded_from_the_start(self, context: Any) -> Iterator[None]:
        """``context``, in which ZeRO-3 partitions parameters as modules are made, with transformers knowing of it."""
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

    def _connect_lazy_logits(self, engine: "DeepSpeedEngine") -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = [engine.register_forward_hook(_announce_backward)]
        for module in _modules_around_heads(engine.module):
            self._hooks.append(module.register_forward_hook(_show_tensors, prepend=True))
            self._hooks.append(module.register_forward_hook(_hide_tensors))

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        if not dist.is_available():
            return
        for stage, options in _STAGES.items():
            name = f"{_NAME}_{stage}"
            if name not in strategy_registry:
                description = f"DeepSpeed ({stage.replace('_', ' ')}) with fused kernels and a loss without logits"
                strategy_registry.register(name, cls, description=description, **options)


class LigerDeepSpeedStrategy(_FusedDeepSpeed, TrainerKernels, pytorch_deepspeed.DeepSpeedStrategy):
    """Lightning's :class:`~lightning.pytorch.strategies.DeepSpeedStrategy` with fused kernels and a fused loss.

    Also runs on CPUs (over gloo). With ``gradient_clip_val`` the norm over all ranks before clipping is logged as
    ``grad_norm``. Hugging Face models that ``configure_model`` builds with ``from_config`` or ``from_pretrained`` are
    initialised and loaded under ZeRO-3 too; those that call a model's class themselves are not initialised by
    transformers there.

    Args:
        kernels: ``"auto"``, ``"none"``, a list of names or a dict with options; see
            :func:`~lightning_liger.apply_liger_kernels`.
        **kwargs: As in Lightning's strategy, such as ``stage``, ``offload_optimizer`` or ``config``.

    Raises:
        ModuleNotFoundError: If DeepSpeed is not installed.
        ValueError: For an unknown kernel.
    """

    strategy_name = _NAME
    saves_folders = True
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
    def _setup_model(self, model: Module) -> Module:
        _bring_back(model, self.root_device)
        self._apply_kernels(model)
        return super()._setup_model(model)

    @override
    def _setup_model_and_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        engine, optimizer = super()._setup_model_and_optimizer(*args, **kwargs)
        self._connect_lazy_logits(engine)
        return engine, optimizer

    @override
    def _initialize_deepspeed_inference(self, model: Module) -> None:
        _bring_back(model, self.root_device)
        super()._initialize_deepspeed_inference(model)
        self._connect_lazy_logits(self.deepspeed_engine)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> None:
        if self.lightning_module.automatic_optimization:
            kwargs["scale_wrt_gas"] = False  # Lightning has divided by the number of micro-batches
        super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        num_steps = self.deepspeed_engine.global_steps
        try:
            result = super().optimizer_step(*args, **kwargs)
        finally:
            self._restore_loss_scale()
        norm = self.deepspeed_engine.get_global_grad_norm()
        if norm is not None and self.deepspeed_engine.global_steps > num_steps and self.config["gradient_clipping"]:
            self.lightning_module.log("grad_norm", float(norm), on_step=True, on_epoch=False)
        return result

    # What the mixin needs for the mean over tokens

    @property
    def scales_gradients(self) -> bool:
        """Whether DeepSpeed's optimizer divides gradients by a loss scale; those of ZeRO 2 and 3 do."""
        return hasattr(type(self.deepspeed_engine.optimizer), "loss_scale")

    def should_accumulate(self) -> bool:
        """Whether more micro-batches come before the optimizer steps."""
        return not self.deepspeed_engine.is_gradient_accumulation_boundary()

    def scale_gradients(self, parameters: Iterable[Parameter], factor: Tensor) -> None:
        """Multiplies the gradients that the coming step takes by ``factor``, before they are clipped.

        They lie in DeepSpeed's buffers, which its step divides by the loss scale: for this step it is another.
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
        optimizer.loss_scale = before * (optimizer.loss_scale / during)  # a dynamic one may have changed in the step


class FabricLigerDeepSpeedStrategy(_FusedDeepSpeed, FabricKernels, fabric_deepspeed.DeepSpeedStrategy):
    """:class:`LigerDeepSpeedStrategy` for Fabric; takes the same arguments.

    DeepSpeed clips gradients by norm if ``config`` has ``gradient_clipping``.
    """

    _writes_by_itself = True
    _lightnings_class = fabric_deepspeed.DeepSpeedStrategy

    def __init__(self, kernels: KernelChoice = "auto", **kwargs: Any) -> None:
        super().__init__(kernels, **kwargs)
        self.config.setdefault("gradient_clipping", 0.0)  # DeepSpeed's own default is 1

    @override
    def module_sharded_context(self) -> Any:
        return self._sharded_from_the_start(super().module_sharded_context())

    @override
    def setup_module_and_optimizers(self, module: Module, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        self._apply_kernels(module)
        return super().setup_module_and_optimizers(module, optimizers, scheduler)

    @override
    def _initialize_engine(self, *args: Any, **kwargs: Any) -> Any:
        engine, *others = super()._initialize_engine(*args, **kwargs)
        self._connect_lazy_logits(engine)
        return engine, *others


def _bring_back(model: Module, device: torch.device) -> None:
    """Undoes Lightning's move to the CPU after an earlier stage; DeepSpeed only moves what is not partitioned."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        model.to(device)


class _ZeroConfig:
    """What transformers asks for to build models whose parameters are partitioned as they are made."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def is_zero3(self) -> bool:
        return True


@contextmanager
def _whole_parameters(model: Module, dtype: torch.dtype | None, device: torch.device) -> Iterator[None]:
    """Shows the parameters of ``model`` as the engine will have them: not partitioned, in ``dtype``, on ``device``.

    Their shapes, dtypes and devices are what rules look at and try replacements with. They take no memory.
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


def _modules_around_heads(model: Module) -> list[Module]:
    """The heads that return lazy logits and all modules that they are in."""
    heads = {
        module
        for module in model.modules()
        if isinstance(module, Patched) and module.liger_replacement.kernel == "linear_cross_entropy"
    }
    return [module for module in model.modules() if not heads.isdisjoint(module.modules())]


# ZeRO-3 frees a module's parameters after its forward, gathers them again when backward reaches the tensors that it
# returned, and frees them when backward reaches those that it got. Lazy logits therefore take views of the parameters
# with them, which keep the gathered memory until the loss is computed, and hooks before and after DeepSpeed's show it
# their tensors: when the head's gradient arrives, its parameter must be whole.


def _show_tensors(module: Module, args: Any, output: Any) -> Any:
    if not isinstance(output, LazyLogits):
        return output
    if output._is_overwritten():
        return output.materialize()
    output = _with_tensors(output, lambda tensor: tensor.view_as(tensor))
    return _Shown((output, _tensors(output)))


class _Shown(list):
    """Lazy logits and their tensors, in a list as DeepSpeed looks into."""


def _hide_tensors(module: Module, args: Any, output: Any) -> Any:
    if not isinstance(output, _Shown):
        return output
    logits, tensors = output
    watched = dict(zip(map(id, _tensors(logits)), tensors, strict=True))
    return _with_tensors(logits, lambda tensor: watched[id(tensor)])


def _announce_backward(engine: "DeepSpeedEngine", args: Any, output: Any) -> None:
    """Lets the engine know when backward starts, where it found no tensor to watch because only lazy logits left it."""
    leaves = tree_leaves(output)
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        return
    lazy = [leaf for leaf in leaves if isinstance(leaf, LazyLogits)]
    tensors = [tensor for leaf in lazy for tensor in _tensors(leaf) if tensor.requires_grad]
    if tensors:
        torch.autograd.graph.register_multi_grad_hook(tensors, lambda _: engine._backward_prologue(), mode="any")


def _tensors(logits: LazyLogits) -> list[Tensor]:
    head = logits.head
    return [tensor for tensor in (logits.hidden_states, head.weight, head.bias, head.adapter) if tensor is not None]


def _with_tensors(logits: LazyLogits, function: Callable[[Tensor], Tensor]) -> LazyLogits:
    return logits.changed(hidden_states=function(logits.hidden_states), head=logits.head.map(function))
