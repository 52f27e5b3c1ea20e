"""What the Trainer's strategies have in common."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import lightning as L
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn import Module
from torch.optim import Optimizer

from liger_ops.arguments import check_choice
from lightning_liger.activations.plan import Plan
from lightning_liger.patching.apply import KernelChoice
from lightning_liger.resuming.rank_state import RankStates
from lightning_liger.resuming.safe_loading import check_is_of_trainer
from lightning_liger.resuming.sigterm import GracefulShutdown
from lightning_liger.sequences.context_parallel import ContextParallel, check_size
from lightning_liger.strategies.common import CommonStrategy
from lightning_liger.strategies.parts.buffers import buffers_as_pretrained
from lightning_liger.strategies.parts.optimizer_states import load_in_trainer
from lightning_liger.strategies.precision import OnNonfiniteGrad, control_gradients, lazy_until_the_end_of, settled
from lightning_liger.training.protocol import Engine
from lightning_liger.weights.meta_device import initialize


class TrainerStrategy(CommonStrategy, Strategy):
    """Context parallelism, gradients and states of ranks. A mixin for strategies of the Trainer.

    Checkpoints hold the state of each rank (see :class:`~lightning_liger.resuming.rank_state.RankStates`), so that a
    resumed run reproduces the uninterrupted run, on CPUs bit for bit; data loaders resume in the middle of an epoch,
    and validation leaves the random states of training unchanged. On SIGTERM training stops gracefully (see
    :class:`~lightning_liger.resuming.sigterm.GracefulShutdown`).

    With ``context_parallel_size`` consecutive ranks get the same batches, and the steps of
    :class:`~lightning_liger.LigerLMMixin` take each rank's shard of the rows. Parameters are still replicated or
    sharded over all ranks. In ``predict`` rows stay whole.
    """

    _initializes_on_meta = False
    """Whether models may be built on the meta device."""

    def __init__(
        self,
        kernels: KernelChoice = "auto",
        on_nonfinite_grad: OnNonfiniteGrad = "ignore",
        *,
        context_parallel_size: int = 1,
        **kwargs: Any,
    ) -> None:
        check_choice("on_nonfinite_grad", on_nonfinite_grad, get_args(OnNonfiniteGrad))
        check_size(context_parallel_size, context_parallel_size)
        self.on_nonfinite_grad = on_nonfinite_grad
        self.context_parallel_size = context_parallel_size
        self.context_parallel: ContextParallel | None = None
        self.engine = Engine(self)
        """The strategy as the module sees it."""
        self._stepped: Optimizer | None = None
        """The optimizer whose step used the gradients that are still there."""
        self._rank_states = RankStates()
        self._shutdown = GracefulShutdown()
        super().__init__(kernels, **kwargs)
        self.engine.initializes_on_meta = self._initializes_on_meta
        self._activations.layers_communicate = context_parallel_size > 1

    # Set-up

    def connect(self, model: L.LightningModule) -> None:
        plugin: Any = self.precision_plugin
        self.precision_plugin = plugin  # without one Lightning makes a new one each time
        self._control_plugin(plugin)
        vars(plugin).pop("convert_input", None)
        if getattr(model, "keeps_float_inputs", False):
            plugin.convert_input = _unchanged
        trainer: Any = model.trainer
        averaging = [each for each in trainer.callbacks if isinstance(each, WeightAveraging)]
        if averaging and self.engine.initializes_on_meta:
            raise ValueError(
                f"callbacks must not have {type(averaging[0]).__name__} under {type(self).__name__}: it averages whole"
                " parameters, and these are shards; use 'liger' or 'liger_ddp'"
            )
        super().connect(model)

    def _control_plugin(self, plugin: Any) -> None:
        """Lets the precision plugin clip; in each run, as several Trainers may share a plugin."""
        control_gradients(plugin, self.on_nonfinite_grad)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Lightning's, with one replica for each group of ranks that share sequences."""
        options: dict[str, Any] = super().distributed_sampler_kwargs  # type: ignore[misc]  # of ParallelStrategy
        size = self.context_parallel_size
        return {"num_replicas": options["num_replicas"] // size, "rank": options["rank"] // size}

    def setup(self, trainer: L.Trainer) -> None:
        self._share_sequences(trainer)
        plugin: Any = self.precision_plugin
        # Under every engine Lightning's set-up calls this before it wraps the model, and the dtypes are final then.
        plugin.convert_module = partial(self._convert, plugin.convert_module)
        try:
            super().setup(trainer)
        finally:
            del plugin.convert_module
        if self.fault_tolerance:
            self._shutdown.install(trainer)

    def _share_sequences(self, trainer: L.Trainer) -> None:
        assert self.lightning_module is not None
        size = self.context_parallel_size
        if size == 1 or trainer.predicting:
            ContextParallel.undo(self.lightning_module)
            return
        check_size(size, trainer.world_size)
        replicas = super().distributed_sampler_kwargs["num_replicas"]  # type: ignore[misc]
        if replicas != trainer.world_size:
            raise ValueError(
                f"context_parallel_size={size} cannot be combined with tensor parallelism: {trainer.world_size}"
                f" processes are {replicas} data-parallel ones"
            )
        self.context_parallel = self.context_parallel or ContextParallel(size)
        self.context_parallel.apply(self.lightning_module)

    def _convert(self, convert: Callable[[Module], Module], model: Module) -> Module:
        """``model`` in the engine's dtypes, and prepared."""
        with self._patching.left_to_the_strategy(), buffers_as_pretrained(model):
            model = convert(model)
        return self._prepare(model)

    def _announce_plan(self, line: str, plan: Plan, fits: bool) -> None:
        super()._announce_plan(line, plan, fits)
        for logger in self._trainer.loggers:
            logger.log_metrics(plan.metrics(), step=self._trainer.global_step)

    def model_to_device(self) -> None:
        if self.model is not None:
            initialize(self.model, self.root_device)
        super().model_to_device()  # type: ignore[safe-super]  # abstract in Lightning's base, not in its engines

    # Steps

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.fault_tolerance:
            self._rank_states.on_train_start(self._trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.fault_tolerance:
            self._rank_states.on_train_batch_start(batch_idx, self._trainer)
            self._shutdown.agree(self._trainer)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        stepped, self._stepped = self._stepped, None
        if stepped is not None and not self._watches_gradients():
            stepped.zero_grad()  # Lightning does so after forward, with activations and old gradients in memory
        with self._activations.advice_on_memory():
            return super().training_step(*args, **kwargs)

    def _watches_gradients(self) -> bool:
        """Whether a module or callback has something to do when gradients are zeroed, or zeroes them."""
        module: Any = self.lightning_module
        hooks = ("optimizer_zero_grad", "on_before_zero_grad")
        is_own = not module.automatic_optimization or any(is_overridden(hook, module) for hook in hooks)
        callbacks = module.trainer.callbacks
        return is_own or any(is_overridden("on_before_zero_grad", each, parent=Callback) for each in callbacks)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        module: Any = model or self.lightning_module
        is_step = not (self.handles_gradient_accumulation and self.engine.should_accumulate())
        with self._activations.advice_on_memory():
            result = super().optimizer_step(optimizer, settled(closure, module), model, **kwargs)
        if is_step:
            self._activations.step_ends()
        if not self.handles_gradient_accumulation:  # or else the engine has gradients in its own buffers
            self._stepped = optimizer
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with lazy_until_the_end_of("a validation step"):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with lazy_until_the_end_of("a test step"):
            return super().test_step(*args, **kwargs)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self.fault_tolerance:
            self._rank_states.on_validation_start(self._trainer)

    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self.fault_tolerance:
            self._rank_states.on_validation_end()

    def process_dataloader(self, dataloader: Any) -> Any:
        loader = super().process_dataloader(dataloader)
        return self._rank_states.process_dataloader(loader, self._trainer) if self.fault_tolerance else loader

    # Checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self.fault_tolerance:
            self._rank_states.add_to(checkpoint, self._trainer)
        save = super().save_checkpoint
        self._checkpoints.save(filepath, lambda path: save(checkpoint, path, storage_options))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a checkpoint; :mod:`~lightning_liger.resuming.safe_loading` says what is refused."""
        load = super().load_checkpoint

        def read(path: Any) -> dict[str, Any]:
            own = partial(load, path, weights_only)
            checkpoint = load_in_trainer(self, Path(path), own) if self._checkpoints.are_sharded else own()
            check_is_of_trainer(checkpoint, path)
            return checkpoint

        checkpoint: dict[str, Any] = self._checkpoints.load("ckpt_path", checkpoint_path, weights_only, read)
        if self.fault_tolerance:
            self._rank_states.take_from(checkpoint, self._trainer)
        return checkpoint

    # The end

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self.fault_tolerance:
            self._shutdown.set_exit_code(exception)

    def teardown(self) -> None:
        super().teardown()
        for controlled in self._activations.controlled:
            controlled.graphs = None  # frees their memory: layers run eagerly from now on
        self._rank_states.forget()  # of a run that failed, or had nothing left to do, after it loaded its checkpoint
        self._stepped = None

    @property
    def _trainer(self) -> L.Trainer:
        assert self.lightning_module is not None  # Lightning connects it before it calls any hook
        return self.lightning_module.trainer


def _unchanged(batch: Any) -> Any:
    return batch
