"""Graceful shutdown on SIGTERM: all ranks stop after the same batch, with exit code 143."""

import ctypes
import functools
import signal
from typing import Any

import lightning as L
import psutil
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_liger.host_copy import HostCopy

_PR_SET_PDEATHSIG = 1  # of Linux's prctl


class _Agreed(HostCopy):
    """Whether any rank got SIGTERM, in the place of Lightning's bool: known once it is asked for, after the batch."""

    def __bool__(self) -> bool:
        return bool(self.wait())


class GracefulShutdown:
    """Ends training on SIGTERM, sent to any of the ranks, after the batch that they are at.

    All ranks raise ``SIGTERMException``, for which ``ModelCheckpoint(save_on_exception=True)`` saves; the process ends
    with exit code 143. Lightning's handler starts a collective inside the signal handler, in the middle of others, and
    waits forever unless all ranks got the signal.
    """

    _received = _is_child = False

    def install(self, trainer: L.Trainer) -> None:
        """Replaces Lightning's SIGTERM handler; to be called before the Trainer registers its handlers."""
        self._received = False
        # Private to Lightning, which has no public way to replace its handler or to request a stop.
        _replace(trainer._signal_connector, "_sigterm_notifier_fn", functools.partial(self._handle, trainer))
        # It waits for the device in each batch; :meth:`agree` does the same without.
        _replace(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)
        _replace(trainer._signal_connector, "received_sigterm", False)
        # By default Lightning starts the other processes of a machine from the first one.
        environment = getattr(trainer.strategy, "cluster_environment", None)
        self._is_child = isinstance(environment, LightningEnvironment) and trainer.local_rank > 0
        parent = psutil.Process().parent() if self._is_child else None
        # Makes Linux kill this process when its parent ends, for which NCCL would wait half an hour; but processes that
        # a shell started by hand must not end with it.
        if parent is not None and parent.name().startswith("python"):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def _handle(self, trainer: L.Trainer, *_: Any) -> None:
        launcher = trainer.strategy.launcher
        if not self._received and launcher is not None:
            launcher.kill(signal.SIGTERM)
        self._received = True
        if not (trainer.state.fn == TrainerFn.FITTING and _has_several_ranks(trainer)):
            _replace(trainer._signal_connector, "received_sigterm", True)

    def agree(self, trainer: L.Trainer) -> None:
        """Makes all ranks stop after this batch if any of them got SIGTERM; to be called on all ranks in each batch."""
        if not _has_several_ranks(trainer):
            return
        received = torch.full((), int(self._received), dtype=torch.int32, device=trainer.strategy.root_device)
        dist.all_reduce(received, op=dist.ReduceOp.MAX)
        # Lightning reads it at the end of the batch. The device has all of the batch to do then, so it never idles.
        _replace(trainer._signal_connector, "received_sigterm", _Agreed(received))

    def set_exit_code(self, exception: BaseException) -> None:
        """Makes 143 the exit code of the process if ``exception`` is due to SIGTERM; Lightning's exit code is 0."""
        # Lightning's launcher takes a nonzero code of a process that it started for a failure, and kills rank 0.
        if isinstance(exception, SIGTERMException) and not self._is_child:
            exception.code = 128 + signal.SIGTERM  # by which shells and schedulers recognize it


def _replace(owner: Any, name: str, value: Any) -> None:
    getattr(owner, name)  # an AttributeError if Lightning has another one: setting it would have no effect
    setattr(owner, name, value)


def _has_several_ranks(trainer: L.Trainer) -> bool:
    return dist.is_initialized() and trainer.world_size > 1
