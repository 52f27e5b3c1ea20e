"""The ops of other packages, loaded when they are about to run."""

import contextlib
import functools
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Unavailable
from benchmarks.losses import eager
from benchmarks.losses.data import Data
from benchmarks.losses.formulas import CLIP_HIGH, CLIP_LOW, DPO_BETA

_TRL_VOCAB_CHUNK = 32768  # the size that TRL's trainers pass


@functools.cache
def trl_kernel(name: str) -> types.ModuleType:
    """A file of TRL's folder ``kernels``, without importing TRL, which needs further packages.

    Raises:
        Unavailable: If TRL is not installed, or does not have the file.
    """
    package = importlib.util.find_spec("trl")
    if package is None or not package.submodule_search_locations:
        raise Unavailable("trl is not installed")
    folder = Path(package.submodule_search_locations[0]) / "kernels"
    if not (folder / f"{name}.py").exists():
        raise Unavailable(f"this version of trl has no kernels/{name}.py")
    root = "_benchmarked_trl"
    utils = types.ModuleType(f"{root}.trainer.utils")
    utils.maybe_gather_lm_head_ctx = lambda *parameters: contextlib.nullcontext()  # for DeepSpeed only
    for parent in (root, f"{root}.kernels", f"{root}.trainer"):
        sys.modules.setdefault(parent, types.ModuleType(parent)).__path__ = []
    sys.modules[utils.__name__] = utils
    sys.modules[f"{root}.kernels"].__path__ = [str(folder)]
    return importlib.import_module(f"{root}.kernels.{name}")


def _trl_log_probs(hidden_states: Tensor, weight: Tensor, labels: Tensor, *outputs: str) -> tuple[Tensor, ...]:
    function = trl_kernel("chunked_logprob").ChunkedLogProbFunction
    return function.apply(hidden_states, weight, None, labels, 1.0, _TRL_VOCAB_CHUNK, None, 1.0, outputs)


def trl_log_probs(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return _trl_log_probs(hidden_states, weight, labels)[0]


def trl_with_entropy(data: Data) -> Tensor:
    log_probs, entropy, *_ = _trl_log_probs(data.hidden_states, data.weight, data.labels, "entropy")
    return -(data.coefficients * (log_probs + entropy)).sum()


def trl_divergence(data: Data, kind: str) -> Tensor:
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": eager.BETA}[kind]
    function = trl_kernel("chunked_divergence").ChunkedDivergenceFunction
    student, teacher = (data.hidden_states, data.weight, None), (data.other_hidden_states, data.other_weight, None)
    return function.apply(*student, *teacher, beta)[0].mean()


def _liger_kernel(name: str) -> Any:
    """A class of liger-kernel's chunked losses.

    Raises:
        Unavailable: If liger-kernel is not installed.
    """
    try:
        from liger_kernel import chunked_loss
    except ImportError as error:
        raise Unavailable(str(error)) from error
    return getattr(chunked_loss, name)


def liger_dpo(data: Data) -> Tensor:
    loss = _liger_kernel("LigerFusedLinearDPOLoss")(beta=DPO_BETA)
    shape = (data.sizes.num_sequences, data.sizes.seq_len)
    hidden_states, reference = (states.view(*shape, -1) for states in (data.hidden_states, data.other_hidden_states))
    found = loss(
        data.weight,
        hidden_states,
        data.labels.view(shape),
        ref_input=reference,
        ref_weight=data.other_weight,
    )
    return found[0]


def liger_grpo(data: Data) -> Tensor:
    loss = _liger_kernel("LigerFusedLinearGRPOLoss")(
        beta=0.0, use_ref_model=False, epsilon_low=CLIP_LOW, epsilon_high=CLIP_HIGH, loss_type="dapo"
    )
    shape = (data.sizes.num_sequences, data.sizes.seq_len)
    found = loss(
        data.hidden_states.view(*shape, -1),
        data.weight,
        data.labels.view(shape),
        torch.ones(shape, device=data.weight.device),
        data.advantages,
        old_per_token_logps=data.old_log_probs.view(shape),
    )
    return found[0]


def liger_divergence(data: Data, kind: str) -> Tensor:
    options = {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0}
    if kind == "cosine":
        loss = _liger_kernel("LigerFusedLinearCosineSimilarityLoss")(beta=1.0, **options)
    else:
        beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": eager.BETA}[kind]
        loss = _liger_kernel("LigerFusedLinearJSDLoss")(beta=beta, **options)
    return loss(data.hidden_states, data.weight, data.other_hidden_states, data.other_weight, data.labels)
