"""Divergences of rows of logits and their gradients: formulas, plain PyTorch, and what ranks exchange.

With z the tempered logits of the student (s) and the teacher (t), lse their log-sum-exps, q = exp(z_s - lse_s) and
p = exp(z_t - lse_t), d = (z_t - lse_t) - (z_s - lse_s), and for the mixtures, with beta the teacher's share in m,

    m = (1 - beta) * q + beta * p,   r = log(q / m) = -log((1 - beta) + beta * exp(d)),   log(p / m) = d + r

each divergence is the sum over classes of a value v, and its gradient is w - q * sum(w) for a slope w, which is
q * dv/dq up to multiples of q:

    kind              v                                w
    forward_kl        p * d                            -p
    reverse_kl        -q * d                           -q * d
    mixed             beta * forward_kl + (1 - beta) * reverse_kl, both
    jsd               beta * p * (d + r) + w           (1 - beta) * q * r
    skew_kl           p * (d + r)                      -(1 - beta) * p * exp(r)
    skew_reverse_kl   q * r                            q * r - (1 - beta) * q * exp(r)
    total_variation   abs(q - p) / 2                   q * sign(q - p) / 2

    mse is mean((z_s - z_t)**2), with the gradient 2 * (z_s - z_t) / vocab_size, and cosine
    1 - z_s.z_t / (|z_s| * |z_t|), with the gradient (z_s * z_s.z_t / |z_s|**2 - z_t) / (|z_s| * |z_t|).

d comes from differences of logits, each less the largest of its row, and a quotient of normalizers, never from two
rounded log-probabilities, so that equal models have divergence 0, and models of different sizes of logits no more
rounding. exp(d) is taken of d clamped to +-80: beyond, one of p and q is below e**-80 of the other, and no term is left
of what the clamp changes. No logarithm of a probability is taken. Sources: MiniLLM (arXiv:2306.08543, reverse KL), GKD
(arXiv:2306.13649, generalized JSD), DistiLLM (arXiv:2402.03898, skew KL).

A row takes three steps, of which each needs sums over the whole row from the one before: maxima and normalizers, the
sums of v and w, the gradient. With c = z less its maximum, the KLs' sums follow from those of exp(c_t) * (c_t - c_s)
and exp(c_s) * (c_s - c_t), which the first step has. Where the vocabulary is spread over ranks, they exchange only
these sums, in float64.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from liger_ops import backend
from liger_ops.collectives import all_gather
from liger_ops.divergence.kernels import Rows, launch_divergence
from liger_ops.divergence.options import DISTRIBUTION_KINDS, KL_KINDS
from liger_ops.loss.chunked_loss import CPU_CHUNK_BYTES
from liger_ops.loss.options import IGNORED
from liger_ops.loss.rows import transform_logits
from liger_ops.loss.vocab_parallel import VocabShard

_CLAMP = 80.0
_SMALLEST_DECAY = 1e-300  # an infinite sum stays infinite
_TEMPORARIES = 6  # of a row's size, in plain PyTorch


def row_dtype(student: Tensor, teacher: Tensor) -> torch.dtype:
    """The dtype of divergences: at least float32, and float64 if either model's logits are."""
    return torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)


def write_rows(rows: Rows, shard: VocabShard | None) -> None:
    """Writes the weighted divergences of some tokens, and the gradient of the student's logits.

    With ``shard`` the columns are a part of the vocabulary of which other ranks have the rest; every rank has to call.
    """
    student, teacher, labels, token_weight, grad_scale, options, token_index, losses, grad_logits = rows
    kind, num_rows = options.resolved_kind, student.shape[0]
    of_student, of_teacher = options.transforms
    vocab_size = student.shape[1] if shard is None else shard.vocab_size
    if backend.runs_on_triton(student, teacher):
        if shard is None:
            launch_divergence(rows, vocab_size)
            return
        sums = losses.new_zeros(6, num_rows)
        launch_divergence(rows, vocab_size, 1, sums)
        sums = _merge(sums, shard).float()
        if kind in DISTRIBUTION_KINDS and kind not in KL_KINDS:
            launch_divergence(rows, vocab_size, 2, sums)
            sums[4:] = _total(sums[4:], shard)
        launch_divergence(rows, vocab_size, 3, sums)
        return
    num_columns = student.shape[1] if shard is None else -(-shard.vocab_size // shard.group.size())  # of every rank
    size = max(1, CPU_CHUNK_BYTES // (_TEMPORARIES * num_columns * losses.element_size()))
    for start in range(0, num_rows, size):
        part = slice(start, min(start + size, num_rows))
        index = torch.arange(part.start, part.stop, device=labels.device) if token_index is None else token_index[part]
        z_s = transform_logits(student[part].to(losses.dtype), of_student)
        z_t = transform_logits(teacher[part].to(losses.dtype), of_teacher)
        compare = _compare_distributions if kind in DISTRIBUTION_KINDS else _compare_logits
        values, grad = compare(z_s, z_t, kind, float(options.beta), shard, with_gradient=grad_logits is not None)
        ignored = labels[index] == IGNORED
        factor = torch.full_like(values, options.factor)
        if token_weight is not None:
            factor = factor * token_weight[index].to(factor.dtype)
        losses.index_copy_(0, index, (values * factor).masked_fill_(ignored, 0.0))
        if grad_logits is not None and grad is not None:
            if grad_scale is not None:
                factor = factor * (grad_scale[index] if grad_scale.dim() else grad_scale).to(factor.dtype)
            grad *= (factor * of_student.logit_scale)[:, None]
            if of_student.softcap is not None:
                grad *= 1.0 - (z_s / of_student.softcap) ** 2
            grad_logits[part].copy_(grad.masked_fill_(ignored[:, None], 0.0))


def _finite(maximum: Tensor) -> Tensor:
    return maximum.where(maximum != -torch.inf, 0.0)


def _sum_rows(z_s: Tensor, z_t: Tensor) -> Tensor:
    """The first step: ``[6, num_rows]``, the student's and the teacher's maximum and normalizer, and the KLs' sums."""
    if not z_s.shape[1]:
        return z_s.new_zeros(6, len(z_s))
    student_max, teacher_max = (_finite(z.amax(-1)) for z in (z_s, z_t))
    c_s, c_t = z_s - student_max[:, None], z_t - teacher_max[:, None]
    e_s, e_t, excess = c_s.exp(), c_t.exp(), c_t - c_s
    first = (e_t * excess).where(e_t != 0, 0.0).sum(-1)
    second = (e_s * excess).neg_().where(e_s != 0, 0.0).sum(-1)
    return torch.stack([student_max, e_s.sum(-1), teacher_max, e_t.sum(-1), first, second])


def _merge(sums: Tensor, shard: VocabShard | None) -> Tensor:
    """The first step's sums of whole rows from those of every rank's part."""
    if shard is None:
        return sums
    maxima, normalizers, moves, decays = [], [], [], []
    parts = all_gather(sums.double(), shard.group)
    for place in (0, 2):
        rank_values, totals = parts[:, place], parts[:, place + 1]
        rank_values = rank_values.where(totals != 0, -torch.inf)  # of shards without classes, or of impossible ones
        maximum = _finite(rank_values.amax(0))
        moved = rank_values - maximum
        maxima.append(maximum)
        decays.append(moved.exp())
        normalizers.append(totals * decays[-1])
        moves.append(moved.where(moved > -torch.inf, 0.0))
    moved = moves[1] - moves[0]  # how much each c_t - c_s, of the shard's maxima, becomes more
    first = parts[:, 4] * decays[1].clamp(min=_SMALLEST_DECAY) + moved * normalizers[1]
    second = parts[:, 5] * decays[0].clamp(min=_SMALLEST_DECAY) - moved * normalizers[0]
    own, teacher, *others = (each.sum(0) for each in (*normalizers, first, second))
    return torch.stack([maxima[0], own, maxima[1], teacher, *others])


def _total(sums: Tensor, shard: VocabShard | None) -> Tensor:
    """Sums over all ranks."""
    if shard is not None:
        sums = sums.double()
        dist.all_reduce(sums, group=shard.group)
    return sums


def _compare_distributions(
    z_s: Tensor, z_t: Tensor, kind: str, beta: float, shard: VocabShard | None, *, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Divergences ``[num_rows]`` and their gradients ``[num_rows, num_columns]`` of tempered logits."""
    sums = _merge(_sum_rows(z_s, z_t), shard).to(z_s.dtype)
    student_max, student_sum, teacher_max, teacher_sum, first, second = sums
    delta = (teacher_sum / student_sum).log()  # lse_t - lse_s of logits less their maxima
    c_s, c_t = z_s - student_max[:, None], z_t - teacher_max[:, None]
    d = c_t - c_s
    q, p = c_s.exp_() / student_sum[:, None], c_t.exp_() / teacher_sum[:, None]
    if kind in KL_KINDS:
        share = {"forward_kl": 1.0, "reverse_kl": 0.0}.get(kind, beta)
        value, slope_sum, slope = torch.zeros_like(delta), torch.full_like(delta, -share), -share * p
        if share > 0:
            value = share * (first / teacher_sum - delta)
        if share < 1:
            value = value + (1.0 - share) * (second / student_sum + delta)
            slope_sum += (1.0 - share) * (second / student_sum)
            slope -= ((1.0 - share) * q * d).where(q != 0, 0.0)
    else:
        d = (d - delta[:, None]).nan_to_num_(_CLAMP, _CLAMP, -_CLAMP).clamp_(-_CLAMP, _CLAMP)
        values, slope = _terms(q, p, d, kind, beta)
        value, slope_sum = _total(torch.stack([values.sum(-1), slope.sum(-1)]), shard).to(z_s.dtype)
        is_nan = torch.where(delta.isnan(), torch.nan, 0.0)  # which the clamp would hide
        value, slope_sum = value + is_nan, slope_sum + is_nan
    return value, slope - q * slope_sum[:, None] if with_gradient else None


def _terms(q: Tensor, p: Tensor, d: Tensor, kind: str, beta: float) -> tuple[Tensor, Tensor]:
    """v and w of kinds with two steps of sums."""
    if kind == "total_variation":
        sign = -0.5 * d.sign()
        return (q - p) * sign, q * sign
    r = -(d.exp() * beta + (1.0 - beta)).log()
    if kind == "jsd":
        slope = (1.0 - beta) * q * r
        return beta * p * (d + r) + slope, slope
    if kind == "skew_kl":
        return p * (d + r), (beta - 1.0) * p * r.exp()
    return q * r, q * (r - (1.0 - beta) * r.exp())


def _compare_logits(
    z_s: Tensor, z_t: Tensor, kind: str, beta: float, shard: VocabShard | None, *, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """As :func:`_compare_distributions`, for the kinds that are of logits."""
    if kind == "mse":
        vocab_size = z_s.shape[1] if shard is None else shard.vocab_size
        difference = (z_s - z_t).masked_fill_(z_s == z_t, 0.0)
        value = _total(difference.square().sum(-1), shard).to(z_s.dtype) / vocab_size
        return value, difference.mul_(2.0 / vocab_size) if with_gradient else None
    products = torch.stack([(z_s * z_s).sum(-1), (z_t * z_t).sum(-1), (z_s * z_t).sum(-1)])
    student, teacher, product = _total(products, shard).to(z_s.dtype)
    norm = student.sqrt() * teacher.sqrt()
    inverse = norm.reciprocal().masked_fill(norm == 0, 0.0)  # the cosine is 0 then, and so is its gradient
    share = (product / student).masked_fill(norm == 0, 0.0)
    grad = (z_s * share[:, None]).sub_(z_t).mul_(inverse[:, None]) if with_gradient else None
    return 1.0 - product * inverse, grad
