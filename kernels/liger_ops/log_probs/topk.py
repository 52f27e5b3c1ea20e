"""Log-probabilities of several given classes of each token, of a linear head without materialized logits.

With z the tempered logits of a token, L_k = z[ids_k] - lse and upstream gradients G_k of L_k and g of lse,

    d / dz_j = sum_k(G_k * [j = ids_k]) + (g - sum_k G_k) * exp(z_j - lse).

Every sparse divergence is a function of the L_k that autograd differentiates. A frozen head takes two products of
[num_tokens, hidden_size, vocab_size]: forward also keeps the mean of the head's rows by probability, without those of
the given classes, which backward adds with their factors. A trained head takes four, or three where forward keeps the
logits. Renormalised probabilities, which are those among the given classes, read K rows of the head a token.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import (
    check_bool,
    check_floating,
    check_integer,
    check_number,
    check_same_device,
    check_shape,
    check_tensor,
    wrong_type,
    wrong_value,
)
from liger_ops.log_probs.given_classes import given_logits, rows_sum
from liger_ops.loss.chunked_loss import (
    KeptTokens,
    SavedLogits,
    adapter_pair,
    choose_accumulate_dtype,
    chunked_linear_loss,
)
from liger_ops.loss.launch import GradientRows, launch_loss, launch_shard_gradient
from liger_ops.loss.linear_head import NUM_GRADIENTS, LinearHead, check_head, is_trained
from liger_ops.loss.options import Targets, TokenLossOptions
from liger_ops.loss.token_plan import plan_tokens
from liger_ops.loss.vocab_parallel import VocabShard

_KEPT, _IGNORED = 0, -1


class TopkArguments(NamedTuple):
    """The op's arguments, in its schema's order; see :func:`linear_topk_log_probs`."""

    input: Tensor
    """``[num_tokens, hidden_size]``."""
    weight: Tensor
    bias: Tensor | None
    adapter_input: Tensor | None
    """``[num_tokens, rank]``."""
    adapter_weight: Tensor | None
    ids: Tensor
    """``[num_tokens, K]``."""
    labels: Tensor
    """``[num_tokens]``, -1 for tokens that are not scored, else 0."""
    grad_log_probs: Tensor | None
    """``[num_tokens, K]``: the upstream gradients, in backward, as the next."""
    grad_lse: Tensor | None
    """``[num_tokens]``."""
    chunk_size: int
    accumulate_dtype: torch.dtype
    needs_gradient: list[bool]
    """For each of the first ``NUM_GRADIENTS`` tensors."""
    softcap: float
    """Of tempered logits; 0 for none."""
    logit_scale: float


class TopkResults(NamedTuple):
    """What the op returns; of ignored tokens zeros."""

    log_probs: Tensor
    """``[num_tokens, K]``, at least float32, as the next three."""
    lse: Tensor
    """``[num_tokens]``."""
    share: Tensor
    """``[num_tokens, K]``: each class's probability times ``slope``, 0 where it occurred before."""
    slope: Tensor
    """``[num_tokens, K]``: derivative of the tempered by the raw logit."""
    input: Tensor
    """With upstream gradients the gradient of the tensor of this name, as the rest. In forward the gradient of lse
    without the given classes' part."""
    weight: Tensor
    bias: Tensor
    adapter_input: Tensor
    adapter_weight: Tensor


_NUM_TENSORS = TopkArguments._fields.index("chunk_size")
_FIRST_GRADIENT = TopkResults._fields.index("input")


def _allocate(arguments: TopkArguments) -> tuple[Tensor, ...]:
    """The fields of ``TopkResults`` before the gradients, zeros."""
    dtype = torch.promote_types(arguments.input.dtype, torch.float32)
    of_ids = [torch.zeros_like(arguments.ids, dtype=dtype) for _ in range(3)]
    return of_ids[0], torch.zeros_like(arguments.labels, dtype=dtype), *of_ids[1:]


def _fake_topk(*values: Any) -> list[Tensor]:
    arguments = TopkArguments(*values)
    of_tokens, of_head = arguments.input.dtype, arguments.accumulate_dtype
    dtypes = (of_tokens, of_head, of_head, of_tokens, of_head)
    gradients = [
        arguments.input.new_empty(tensor.shape if needed else 0, dtype=dtype)
        for tensor, needed, dtype in zip(values, arguments.needs_gradient, dtypes, strict=False)
    ]
    return [*_allocate(arguments), *gradients]


@backend.register_op(
    "linear_topk_log_probs(Tensor input, Tensor weight, Tensor? bias, Tensor? adapter_input, Tensor? adapter_weight,"
    " Tensor ids, Tensor labels, Tensor? grad_log_probs, Tensor? grad_lse, SymInt chunk_size,"
    " ScalarType accumulate_dtype, bool[] needs_gradient, float softcap, float logit_scale) -> Tensor[]",
    fake=_fake_topk,
)
def _linear_topk_log_probs(*values: Any) -> list[Tensor]:
    return list(_compute(*values))


def _compute(*values: Any, saved: SavedLogits | None = None) -> TopkResults:
    """The results; logits are saved in forward and read in backward if ``saved`` says so."""
    arguments = TopkArguments(*values)
    input, labels, chunk_size = arguments.input, arguments.labels, arguments.chunk_size
    num_tokens, in_order = labels.shape[0], chunk_size >= labels.shape[0]
    plan = plan_tokens(Targets(labels, None, None), 1, _IGNORED, input, with_order=not in_order)
    visits_all = in_order or (input.is_cuda and torch.cuda.is_current_stream_capturing())
    log_probs, lse, share, slope = _allocate(arguments)
    options = TokenLossOptions(_IGNORED, softcap=arguments.softcap or None, logit_scale=arguments.logit_scale)

    def chunk_loss(logits: Tensor, index: Tensor | None) -> None:
        def of_rows(whole: Tensor) -> Tensor:
            return whole if index is None else whole[index]

        kept = of_rows(labels) != _IGNORED
        ids = _GivenIds.of(of_rows(arguments.ids), logits.shape[1], kept)
        row_lse, lse_error = _lse_of_rows(logits, kept.long() - 1, options)
        z, slopes = _transform(logits.gather(1, ids.safe), options, lse.dtype)
        row_log_probs = z - row_lse[:, None] - lse_error[:, None]
        shares = row_log_probs.exp() * slopes * ids.is_first
        shown = row_log_probs.where(ids.is_class, -torch.inf).masked_fill(ids.is_wrong, torch.nan)
        for whole, part in ((log_probs, shown), (lse, row_lse), (share, shares), (slope, slopes)):
            part = part.masked_fill(~(kept if part.dim() == 1 else kept[:, None]), 0.0)
            if index is None:
                whole.copy_(part)
            else:
                whole.index_copy_(0, index, part)
        if arguments.grad_log_probs is not None and arguments.grad_lse is not None:
            given = of_rows(arguments.grad_log_probs).where(ids.is_class, 0.0).to(lse.dtype)
            factor = of_rows(arguments.grad_lse) - given.sum(1)
            _probabilities_in_place(logits, kept, row_lse, lse_error, factor, options)
            added = (given * slopes).masked_fill(~kept[:, None], 0.0)
            _add_at(logits, ids.safe, added.to(logits.dtype))
        elif any(arguments.needs_gradient):
            _probabilities_in_place(logits, kept, row_lse, lse_error, torch.ones_like(row_lse), options)
            # All of a class's occurrences write the same.
            logits.scatter_(1, ids.safe, logits.gather(1, ids.safe).masked_fill(ids.has_class[:, None], 0.0))

    if saved is not None and saved.chunks:
        saved.to_gradient = chunk_loss
    gradients = chunked_linear_loss(
        input,
        arguments.weight,
        arguments.bias,
        KeptTokens(plan.order, num_tokens if visits_all else plan.num_kept),
        chunk_loss,
        chunk_size=chunk_size,
        accumulate_dtype=arguments.accumulate_dtype,
        needs_gradient=arguments.needs_gradient,
        adapter=adapter_pair(arguments.adapter_input, arguments.adapter_weight),
        saved=saved,
    )
    return TopkResults(log_probs, lse, share, slope, *gradients)


class _GivenIds(NamedTuple):
    """Ids of some rows, ``[num_rows, K]``, and which of them are what."""

    safe: Tensor
    """Classes: in the place of others one of the row's, or 0 if it has none."""
    is_class: Tensor
    is_wrong: Tensor
    """Neither a class nor padding."""
    is_first: Tensor
    """Whether a class occurs for the first time."""
    has_class: Tensor
    """``[num_rows]``."""

    @classmethod
    def of(cls, ids: Tensor, vocab_size: int, kept: Tensor) -> "_GivenIds":
        is_class = (ids >= 0) & (ids < vocab_size)
        has_class = is_class.any(1) & kept
        safe = ids.where(is_class, -1)
        safe = safe.where(is_class, safe.amax(1, keepdim=True).clamp(min=0))
        ordered, order = safe.sort(dim=1, stable=True)
        changes = F.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)
        is_first = torch.zeros_like(changes).scatter_(1, order, changes) & has_class[:, None]
        return cls(safe, is_class, (ids >= vocab_size) & kept[:, None], is_first, has_class)


def _transform(logits: Tensor, options: TokenLossOptions, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tempered logits, and their derivative by the raw ones."""
    z = logits.to(dtype) * options.logit_scale
    slope = torch.full_like(z, options.logit_scale)
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)
        slope = slope * (1.0 - (z / options.softcap) ** 2)
    return z, slope


def _lse_of_rows(logits: Tensor, labels: Tensor, options: TokenLossOptions) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of each row's tempered logits and its rounding error; 0 where the label is ``_IGNORED``."""
    if backend.use_triton(logits):
        losses, lse, lse_error = (logits.new_empty(labels.shape, dtype=torch.float32) for _ in range(3))
        launch_loss(logits, Targets(labels, None, None), None, options, losses=losses, lse=lse, lse_error=lse_error)
        return lse, lse_error
    z, _ = _transform(logits, options, torch.promote_types(logits.dtype, torch.float32))
    lse = z.logsumexp(1).masked_fill(labels == _IGNORED, 0.0)
    return lse, torch.zeros_like(lse)


def _probabilities_in_place(
    logits: Tensor, kept: Tensor, lse: Tensor, lse_error: Tensor, factor: Tensor, options: TokenLossOptions
) -> None:
    """Overwrites logits with the gradient of ``factor * lse``; zeros in rows that are not ``kept``."""
    if backend.use_triton(logits):
        zeros = torch.zeros_like(lse)
        no_labels = torch.full(lse.shape, -1, dtype=torch.int64, device=lse.device)
        factor = (factor * options.logit_scale).to(lse.dtype)
        rows = GradientRows(no_labels, kept, lse, lse_error, factor, zeros, zeros)
        launch_shard_gradient(logits, rows, None, options)
        return
    z, slope = _transform(logits, options, lse.dtype)
    grad = (z - lse[:, None]).exp_().mul_(factor[:, None]).mul_(slope)
    logits.copy_(grad.masked_fill_(~kept[:, None], 0.0))


def _add_at(logits: Tensor, ids: Tensor, values: Tensor) -> None:
    """``logits[row, ids] += values``, in a fixed order; rows may be padded, of which no copy is made."""
    stride = logits.stride(0)
    flat = logits.as_strided(((len(logits) - 1) * stride + logits.shape[1],), (1,))
    rows = torch.arange(len(logits), device=logits.device)[:, None] * stride
    flat.index_put_(((rows + ids).flatten(),), values.flatten(), accumulate=True)


def _changed(values: Sequence[Any], **changes: Any) -> list[Any]:
    return [changes.get(name, value) for name, value in zip(TopkArguments._fields, values, strict=True)]


class _LinearTopkFunction(torch.autograd.Function):
    """Log-probabilities and lse.

    While only gradients of tokens are wanted, forward keeps what makes them; otherwise backward runs over all chunks.
    """

    @staticmethod
    def forward(ctx: Any, saved_chunks: int, *values: Any) -> tuple[Tensor, Tensor]:
        arguments = TopkArguments(*values)
        ctx.waits = is_trained(arguments.needs_gradient)
        if not ctx.waits:
            results = TopkResults(*_linear_topk_log_probs(*values))
            kept = results.share, results.slope, results.input, results.adapter_input
            ctx.save_for_backward(arguments.weight, arguments.adapter_weight, arguments.ids, arguments.labels, *kept)
        else:
            values = tuple(_changed(values, needs_gradient=[False] * NUM_GRADIENTS))
            saved = SavedLogits(saved_chunks) if saved_chunks else None
            computed = _compute(*values, saved=saved) if saved else _linear_topk_log_probs(*values)
            results = TopkResults(*computed)
            ctx.save_for_backward(*arguments[:_NUM_TENSORS], *(saved.chunks if saved else ()))
        ctx.needs_gradient, ctx.settings = arguments.needs_gradient, arguments[_NUM_TENSORS:]
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in values[:NUM_GRADIENTS]]
        return results.log_probs, results.lse

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = [None] * NUM_GRADIENTS
        if ctx.waits:
            saved_tensors = ctx.saved_tensors
            tensors, chunks = saved_tensors[:_NUM_TENSORS], list(saved_tensors[_NUM_TENSORS:])
            values = _changed(
                (*tensors, *ctx.settings), grad_log_probs=grad_log_probs, grad_lse=grad_lse,
                needs_gradient=ctx.needs_gradient,
            )  # fmt: skip
            if chunks:
                saved = SavedLogits(0, chunks, are_needed_again=not backend.graph_ends())
                results = TopkResults(*_compute(*values, saved=saved))
            else:
                results = TopkResults(*_linear_topk_log_probs(*values))
            for place, needed in enumerate(ctx.needs_gradient):
                if needed:
                    gradients[place] = results[_FIRST_GRADIENT + place].to(ctx.dtypes[place])
        else:
            weight, adapter_weight, ids, labels, share, slope, of_input, of_adapter = ctx.saved_tensors
            kept = labels != _IGNORED
            ids = _GivenIds.of(ids, weight.shape[0], kept)
            given = grad_log_probs.where(ids.is_class & kept[:, None], 0.0)
            factor = grad_lse.where(kept, 0.0) - given.sum(1)
            factors = given * slope + factor[:, None] * share
            for place, rest, rows in ((0, of_input, weight), (3, of_adapter, adapter_weight)):
                if ctx.needs_gradient[place]:
                    gradients[place] = rows_sum(rows, ids.safe, factors).addcmul(rest, factor[:, None].to(rest.dtype))
        return None, *gradients, *[None] * (len(TopkArguments._fields) - NUM_GRADIENTS)


def linear_topk_log_probs_reference(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    adapter: tuple[Tensor, Tensor] | None = None,
    renormalize: bool = False,
    mask: Tensor | None = None,
    with_lse: bool = False,
) -> Any:
    """:func:`linear_topk_log_probs` from whole logits in plain PyTorch, which autograd differentiates."""
    logits = F.linear(input, linear_weight, linear_bias)
    if adapter is not None:
        logits = logits + F.linear(*adapter)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    is_class = ids >= 0
    chosen = z.gather(-1, ids.clamp(min=0))
    lse = (chosen.masked_fill(~is_class, -torch.inf) if renormalize else z).logsumexp(-1)
    log_probs = (chosen - lse[..., None]).masked_fill(~is_class, -torch.inf)
    if mask is not None:
        log_probs, lse = log_probs.where(mask[..., None], 0.0), lse.where(mask, 0.0)
    return (log_probs, lse) if with_lse else log_probs


def linear_topk_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    adapter: tuple[Tensor, Tensor] | None = None,
    vocab_shard: VocabShard | None = None,
    renormalize: bool = False,
    mask: Tensor | None = None,
    with_lse: bool = False,
    chunk_bytes: int | None = None,
    saved_logits_bytes: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probabilities of given classes of each token, differentiable; sparse distillation is made of them.

    Args:
        input: Hidden states, ``[..., hidden_size]``.
        linear_weight: The head, ``[vocab_size, hidden_size]``.
        ids: Classes of each token, int64, ``[..., K]``. A class may occur more than once; gradients of its places add
            up. Negative ids are padding, for supports of different sizes: their log-probability is -inf, so that they
            add nothing to a sum of probabilities, and what reaches them in backward is ignored.
        linear_bias: The head's bias, ``[vocab_size]``.
        temperature: Divides the logits, after the soft cap.
        softcap: Logits become ``softcap * tanh(logits / softcap)``, after scaling. None leaves them.
        logit_scale: Factor of the logits.
        adapter: A low-rank update of the logits, as :func:`~liger_ops.linear_cross_entropy` takes it.
        vocab_shard: Not supported; must be None.
        renormalize: Whether probabilities are those among the K classes. Then no other class is looked at: K rows of
            the head are read for each token. A class that occurs twice counts twice.
        mask: bool, ``[...]``: True at tokens that are scored. The others are 0, and cost nothing but with
            ``renormalize``.
        with_lse: Whether to also return the log-sum-exp that log-probabilities are relative to, ``[...]``,
            differentiable.
        chunk_bytes: Budget for one chunk of logits (with ``renormalize``, on a CPU, of rows of the head); by default as
            for :func:`~liger_ops.linear_cross_entropy`.
        saved_logits_bytes: Budget for logits that forward keeps for backward, in whole chunks, if the head is trained;
            backward computes the others again.

    Returns:
        ``[..., K]``, at least float32; with ``with_lse`` a pair. NaN for ids that are no class, on a GPU.

    Raises:
        TypeError: For arguments of another type.
        ValueError: For shapes, dtypes, devices or options that do not fit, and for ids that are no class, if they are
            on the CPU.
    """
    check_floating("input", input)
    check_floating("linear_weight", linear_weight)
    check_floating("linear_bias", linear_bias, optional=True)
    check_tensor("ids", ids)
    check_tensor("mask", mask, optional=True)
    check_same_device("input", input, linear_weight=linear_weight, linear_bias=linear_bias, ids=ids, mask=mask)
    check_number("temperature", temperature, above=0)
    check_number("softcap", softcap, above=0, optional=True)
    check_number("logit_scale", logit_scale)
    check_bool("renormalize", renormalize)
    check_bool("with_lse", with_lse)
    check_integer("chunk_bytes", chunk_bytes, at_least=1, optional=True)
    check_integer("saved_logits_bytes", saved_logits_bytes, at_least=0)
    if vocab_shard is not None:
        raise wrong_value("vocab_shard", "None", vocab_shard)
    if linear_weight.dim() != 2:
        raise ValueError(f"linear_weight must be [vocab_size, hidden_size], got shape {tuple(linear_weight.shape)}")
    tokens = input.shape[:-1]
    labels = torch.full(tokens, _KEPT, dtype=torch.int64, device=input.device)
    if mask is not None:
        if mask.dtype != torch.bool:
            raise wrong_type("mask", "a bool tensor, True at tokens that are scored, or None", mask)
        check_shape("mask", mask, tokens, "input's without its last dimension")
        labels = mask.long() + _IGNORED
    head = check_head(input, linear_weight, linear_bias, labels, adapter, None)
    _check_ids(ids, tokens, linear_weight.shape[0])
    ids = ids.reshape(-1, ids.shape[-1]).contiguous()
    scale, cap = float(logit_scale / temperature), None if softcap is None else float(softcap / temperature)
    with head.products_dtype():
        if renormalize:
            log_probs, lse = _renormalized(head, ids, labels.reshape(-1), scale, cap, chunk_bytes)
        else:
            log_probs, lse = _normalized(head, ids, labels, scale, cap, chunk_bytes, saved_logits_bytes)
    log_probs = log_probs.view(*tokens, ids.shape[1])
    return (log_probs, lse.view(tokens)) if with_lse else log_probs


def _check_ids(ids: Tensor, tokens: torch.Size, vocab_size: int) -> None:
    if ids.dtype != torch.int64:
        raise wrong_value("ids", "class indices of dtype torch.int64", ids)
    if ids.dim() == 0 or ids.shape[:-1] != tokens or ids.shape[-1] == 0:
        raise wrong_value("ids", f"at least one class for each token of input, of shape {(*tokens, 'K')}", ids)
    if ids.device.type == "cpu" and not torch.compiler.is_compiling() and (ids >= vocab_size).any():
        wrong = ids[ids >= vocab_size]
        raise ValueError(
            f"ids must be between 0 and vocab_size - 1 = {vocab_size - 1}, or negative for padding; got"
            f" {wrong[0].item()} ({wrong.numel()} of {ids.numel()} ids are out of range)"
        )


def _normalized(
    head: LinearHead,
    ids: Tensor,
    labels: Tensor,
    scale: float,
    softcap: float | None,
    chunk_bytes: int | None,
    saved_logits_bytes: int,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities among all classes, and the lse."""
    labels = labels.reshape(-1)
    chunk_size = head.chunk_size(chunk_bytes)
    accumulate_dtype = choose_accumulate_dtype(head.dtype, -(-len(labels) // chunk_size))
    options = softcap or 0.0, scale
    values = *head.tensors, ids, labels, None, None, chunk_size, accumulate_dtype, head.needs_gradient, *options
    if not any(head.needs_gradient):
        results = TopkResults(*_linear_topk_log_probs(*values))
        return results.log_probs, results.lse
    return _LinearTopkFunction.apply(head.saved_chunks(saved_logits_bytes, chunk_size), *values)


def _renormalized(
    head: LinearHead, ids: Tensor, labels: Tensor, scale: float, softcap: float | None, chunk_bytes: int | None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities among the given classes, and the log-sum-exp of these."""
    kept = labels != _IGNORED
    given = _GivenIds.of(ids, head.vocab_size, kept)
    logits = given_logits(head.input, head.weight, given.safe, chunk_bytes)
    if head.adapter_input is not None and head.adapter_weight is not None:
        logits = logits + given_logits(head.adapter_input, head.adapter_weight, given.safe, chunk_bytes)
    if head.bias is not None:
        logits = logits + head.bias.to(logits.dtype)[given.safe]
    z, _ = _transform(logits, TokenLossOptions(softcap=softcap, logit_scale=scale), logits.dtype)
    # A token without classes has no distribution: places that cannot be seen keep its gradient finite.
    counts = given.is_class | ~given.has_class[:, None]
    z = z.masked_fill(~counts, -torch.inf)
    log_probs = z.log_softmax(1).masked_fill(~given.is_class, -torch.inf).masked_fill(given.is_wrong, torch.nan)
    lse = z.logsumexp(1).masked_fill(~given.has_class, -torch.inf)
    return log_probs.masked_fill(~kept[:, None], 0.0), lse.masked_fill(~kept, 0.0)
