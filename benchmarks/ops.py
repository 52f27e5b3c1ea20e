"""The memory-bound ops: their shapes, their contenders, and how many passes over memory they need at least.

``eager`` is the plain PyTorch code of Hugging Face's modules. liger-kernel's functions are called as its modules call
them, so some write into their inputs or into the incoming gradients.
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases import Contender, Inputs, Maker, Op, Sweep, liger_kernel, ours, pytorch
from benchmarks.layer_ops import LAYER_OPS
from liger_ops import silu_mul

EPS = 1e-6
_ROW_NORM_PASSES = {"forward": 2, "backward": 3, "both": 5}  # x -> y; x, grad_y -> grad_x
_GATED_PASSES = {"forward": 3, "backward": 5, "both": 8}  # gate, up -> y; gate, up, grad_y -> grad_gate, grad_up
_HIDDEN_SIZES = (4096, 8192, 12288, 16384)


def _bytes_of_first(first: Tensor, *others: Tensor) -> int:
    return first.nbytes


def _norm_inputs(make: Maker, num_tokens: int, hidden_size: int) -> Inputs:
    return Inputs(
        (make.leaf(num_tokens, hidden_size), make.weight(hidden_size)), (make.normal(num_tokens, hidden_size),)
    )


def _add_norm_inputs(make: Maker, num_tokens: int, hidden_size: int) -> Inputs:
    shape = num_tokens, hidden_size
    return Inputs(
        (make.leaf(*shape), make.leaf(*shape), make.weight(hidden_size)), (make.normal(*shape), make.normal(*shape))
    )


def _gated_norm_inputs(make: Maker, num_tokens: int, hidden_size: int) -> Inputs:
    shape = num_tokens, hidden_size
    return Inputs((make.leaf(*shape), make.leaf(*shape), make.weight(hidden_size)), (make.normal(*shape),))


def _modulated_norm_inputs(make: Maker, batch_size: int, seq_len: int, hidden_size: int) -> Inputs:
    scale, shift = (make.leaf(batch_size, 1, hidden_size) for _ in range(2))
    shape = batch_size, seq_len, hidden_size
    return Inputs((make.leaf(*shape), make.weight(hidden_size), scale, shift), (make.normal(*shape),))


def _layer_norm_inputs(make: Maker, num_tokens: int, hidden_size: int) -> Inputs:
    shape = num_tokens, hidden_size
    return Inputs((make.leaf(*shape), make.weight(hidden_size), make.leaf(hidden_size)), (make.normal(*shape),))


def _dyt_inputs(make: Maker, num_tokens: int, hidden_size: int) -> Inputs:
    x, *parameters = _layer_norm_inputs(make, num_tokens, hidden_size).arguments
    return Inputs((x, make.weight(1), *parameters), (make.normal(num_tokens, hidden_size),))


def _poly_norm_inputs(make: Maker, num_tokens: int, hidden_size: int) -> Inputs:
    shape = num_tokens, hidden_size
    return Inputs((make.leaf(*shape), make.weight(3), make.weight(1)), (make.normal(*shape),))


def _group_norm_inputs(make: Maker, batch_size: int, num_channels: int, height: int, width: int) -> Inputs:
    shape = batch_size, num_channels, height, width
    return Inputs((make.leaf(*shape), make.weight(num_channels), make.leaf(num_channels)), (make.normal(*shape),))


def _rotary_inputs(
    make: Maker, batch_size: int, seq_len: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> Inputs:
    # Views of the projections' outputs, [batch_size, seq_len, heads, head_dim].
    q, k = (
        make.normal(batch_size, seq_len, heads, head_dim).transpose(1, 2).requires_grad_()
        for heads in (num_heads, num_kv_heads)
    )
    half = torch.arange(0, head_dim, 2, device=make.device, dtype=torch.float32) / head_dim
    angles = torch.arange(seq_len, device=make.device)[:, None] / 10000**half
    cos, sin = (torch.cat((table, table), dim=-1)[None].to(q.dtype) for table in (angles.cos(), angles.sin()))
    return Inputs(
        (q, k, cos, sin),
        tuple(make.normal(batch_size, seq_len, heads, head_dim).transpose(1, 2) for heads in (num_heads, num_kv_heads)),
    )


def _gated_inputs(make: Maker, num_tokens: int, intermediate_size: int) -> Inputs:
    shape = num_tokens, intermediate_size
    return Inputs((make.leaf(*shape), make.leaf(*shape)), (make.normal(*shape),))


def _activation_inputs(make: Maker, num_tokens: int, intermediate_size: int) -> Inputs:
    return Inputs((make.leaf(num_tokens, intermediate_size),), (make.normal(num_tokens, intermediate_size),))


def _logits_inputs(make: Maker, num_tokens: int, vocab_size: int) -> Inputs:
    return Inputs((make.leaf(num_tokens, vocab_size), make.labels(num_tokens, vocab_size)))


def _eager_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm as in LlamaRMSNorm."""
    hidden_states = x.float()
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return weight * (hidden_states * torch.rsqrt(variance + EPS)).to(x.dtype)


def _eager_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _eager_rms_norm(total, weight), total


def _eager_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """The norm of Mamba 2's layers."""
    hidden_states = x.float() * F.silu(gate.float())
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return weight * (hidden_states * torch.rsqrt(variance + EPS)).to(x.dtype)


def _eager_modulated_rms_norm(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return _eager_rms_norm(x, weight) * (1 + scale) + shift


def _torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, EPS), total


def _torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def _num_groups(x: Tensor) -> int:
    return min(32, x.shape[1] // 2)


def _torch_group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, _num_groups(x), weight, bias, EPS)


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _eager_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def _eager_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _eager_scaled_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """As in FalconH1MLP."""
    return F.silu(gate * 0.75) * up


def _eager_gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def _eager_softmax(x: Tensor) -> Tensor:
    return F.softmax(x, dim=-1)


def _eager_sparsemax(x: Tensor) -> Tensor:
    totals = x.float().sort(dim=-1, descending=True).values
    counts = torch.arange(1, x.shape[-1] + 1, device=x.device)
    sums = totals.cumsum(-1) - 1
    count = (counts * totals > sums).sum(dim=-1, keepdim=True)
    return (x - sums.gather(-1, count - 1) / count).clamp(min=0).to(x.dtype)


def _eager_dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return gamma * torch.tanh(alpha * x) + beta


def _eager_poly_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    powers = (power * torch.rsqrt(power.pow(2).mean(-1, keepdim=True) + EPS) for power in (x**3, x**2, x))
    return sum(factor * power for factor, power in zip(weight, powers, strict=True)) + bias


def _eager_relu_squared(x: Tensor) -> Tensor:
    return torch.square(F.relu(x))


def _divergence(f: Callable[..., Tensor], student: Tensor, teacher: Tensor, kind: str) -> Tensor:
    return f(student, teacher, kind=kind)


# liger-kernel's start from log-probabilities or probabilities.


def _liger_kl(f: Callable[..., Tensor], student: Tensor, teacher: Tensor) -> Tensor:
    return f(student.log_softmax(-1), teacher.log_softmax(-1), reduction="batchmean", log_target=True)


def _liger_log_probs(f: Callable[..., Tensor], student: Tensor, teacher: Tensor) -> Tensor:
    return f(student.log_softmax(-1), teacher.log_softmax(-1))


def _liger_probs(f: Callable[..., Tensor], student: Tensor, teacher: Tensor) -> Tensor:
    return f(student.softmax(-1), teacher.softmax(-1), reduction="batchmean")


def _mlp_inputs(make: Maker, num_tokens: int, hidden_size: int, intermediate_size: int) -> Inputs:
    sizes = 2 * [(intermediate_size, hidden_size)] + [(hidden_size, intermediate_size)]
    weights = [(make.normal(*size) * size[1] ** -0.5).requires_grad_() for size in sizes]
    return Inputs((make.leaf(num_tokens, hidden_size), *weights), (make.normal(num_tokens, hidden_size),))


def _eager_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


class _MLP(nn.Module):
    """Its weights are leaves of the benchmark's, no parameters."""

    def __init__(self, *weights: Tensor) -> None:
        super().__init__()
        self.gate, self.up, self.down = weights

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(silu_mul(F.linear(x, self.gate), F.linear(x, self.up)), self.down)


def _eager_scores(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return log_probs.gather(-1, labels[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def _scores_inputs(make: Maker, num_tokens: int, vocab_size: int) -> Inputs:
    upstream = tuple(make.normal(num_tokens).float() for _ in range(2))
    return Inputs(_logits_inputs(make, num_tokens, vocab_size).arguments, upstream)


def _distillation_inputs(make: Maker, num_tokens: int, vocab_size: int) -> Inputs:
    return Inputs((make.leaf(num_tokens, vocab_size), make.normal(num_tokens, vocab_size)))


def _eager_divergence(student: Tensor, teacher: Tensor, kind: str) -> Tensor:
    s, t = (each.to(torch.promote_types(each.dtype, torch.float32)).log_softmax(-1) for each in (student, teacher))
    if kind == "total_variation":
        return 0.5 * (s.exp() - t.exp()).abs().sum(-1).mean()
    if kind == "jsd":
        mixture = torch.stack((s, t)).logsumexp(0) - math.log(2)
        return 0.5 * sum((each.exp() * (each - mixture)).sum(-1).mean() for each in (s, t))
    return (t.exp() * (t - s)).sum(-1).mean()


def _eager_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels)


_OPS = (
    Op(
        name="rms_norm",
        title="RMSNorm",
        inputs=_norm_inputs,
        exact=_torch_rms_norm,
        contenders={
            "ours": ours("rms_norm", lambda f, x, weight: f(x, weight.shape, weight, EPS, casting="llama")),
            "eager": Contender(_eager_rms_norm),
            "torch": Contender(_torch_rms_norm),
            "liger": liger_kernel("liger_rms_norm", lambda f, x, weight: f(x, weight, EPS)),
        },
        shapes=((16384, 4096), (32768, 2048), (2048, 16384)),
        small=(256, 1024),
        tiny=(16, 64),
        amount=_bytes_of_first,
        passes=_ROW_NORM_PASSES,
        sweep=Sweep("hidden size", _HIDDEN_SIZES, lambda hidden_size: (8192, hidden_size), "8192 tokens"),
    ),
    Op(
        name="add_rms_norm",
        title="Add and RMSNorm",
        inputs=_add_norm_inputs,
        exact=_torch_add_rms_norm,
        contenders={
            "ours": ours(
                "add_rms_norm",
                lambda f, x, residual, weight: f(x, residual, weight.shape, weight, EPS, casting="llama"),
            ),
            "eager": Contender(_eager_add_rms_norm),
            "torch": Contender(_torch_add_rms_norm),
            "liger": liger_kernel(
                "liger_fused_add_rms_norm", lambda f, x, residual, weight: f(x, residual, weight, EPS)
            ),
        },
        shapes=((16384, 4096),),
        small=(256, 1024),
        tiny=(16, 64),
        amount=_bytes_of_first,
        passes={"forward": 4, "backward": 4, "both": 8},  # both inputs share one gradient
    ),
    Op(
        name="gated_rms_norm",
        title="Gated RMSNorm",
        inputs=_gated_norm_inputs,
        exact=lambda x, gate, weight: _torch_rms_norm(x * F.silu(gate), weight),
        contenders={
            "ours": ours(
                "gated_rms_norm",
                lambda f, x, gate, weight: f(x, gate, weight, EPS, norm_before_gate=False, casting="llama"),
            ),
            "eager": Contender(_eager_gated_rms_norm),
        },
        shapes=((16384, 4096), (262144, 128)),
        small=(256, 1024),
        tiny=(16, 64),
        amount=_bytes_of_first,
        passes=_GATED_PASSES,
    ),
    Op(
        name="modulated_rms_norm",
        title="Modulated RMSNorm",
        inputs=_modulated_norm_inputs,
        exact=lambda x, weight, scale, shift: _torch_rms_norm(x, weight) * (1 + scale) + shift,
        contenders={
            "ours": ours("modulated_rms_norm", lambda f, *tensors: f(*tensors, EPS)),
            "eager": Contender(_eager_modulated_rms_norm),
            "liger": liger_kernel("liger_modulated_rms_norm", lambda f, *tensors: f(*tensors, EPS)),
        },
        shapes=((16, 1024, 4096), (64, 256, 1152)),
        small=(2, 128, 1024),
        tiny=(2, 8, 64),
        amount=_bytes_of_first,
        passes=_ROW_NORM_PASSES,
    ),
    Op(
        name="layer_norm",
        title="LayerNorm",
        inputs=_layer_norm_inputs,
        exact=_torch_layer_norm,
        contenders={
            "ours": ours("layer_norm", lambda f, x, weight, bias: f(x, weight.shape, weight, bias, EPS)),
            "eager": Contender(_torch_layer_norm),  # already one fused op
            "liger": liger_kernel("liger_layer_norm", lambda f, x, weight, bias: f(x, weight, bias, EPS)),
        },
        shapes=((16384, 4096), (4096, 16384), (32768, 1024)),
        small=(256, 1024),
        tiny=(16, 64),
        amount=_bytes_of_first,
        passes=_ROW_NORM_PASSES,
        sweep=Sweep("hidden size", _HIDDEN_SIZES, lambda hidden_size: (8192, hidden_size), "8192 tokens"),
    ),
    Op(
        name="group_norm",
        title="GroupNorm",
        inputs=_group_norm_inputs,
        exact=_torch_group_norm,
        contenders={
            "ours": ours("group_norm", lambda f, x, weight, bias: f(x, _num_groups(x), weight, bias, EPS)),
            "eager": Contender(_torch_group_norm),  # already one fused op
            "liger": liger_kernel(
                "liger_group_norm", lambda f, x, weight, bias: f(x, weight, bias, x.shape[1], _num_groups(x), EPS)
            ),
        },
        shapes=((16, 512, 64, 64),),
        small=(4, 64, 32, 32),
        tiny=(2, 8, 4, 4),
        amount=_bytes_of_first,
        passes=_ROW_NORM_PASSES,
    ),
    Op(
        name="dyt",
        title="DyT",
        inputs=_dyt_inputs,
        exact=_eager_dyt,
        contenders={"ours": ours("dyt"), "eager": Contender(_eager_dyt), "liger": liger_kernel("liger_dyt")},
        shapes=((16384, 4096),),
        small=(256, 1024),
        tiny=(8, 64),
        amount=_bytes_of_first,
        passes=_ROW_NORM_PASSES,
    ),
    Op(
        name="poly_norm",
        title="PolyNorm",
        inputs=_poly_norm_inputs,
        exact=_eager_poly_norm,
        contenders={
            "ours": ours("poly_norm", lambda f, *tensors: f(*tensors, EPS)),
            "eager": Contender(_eager_poly_norm),
            "liger": liger_kernel("liger_poly_norm", lambda f, *tensors: f(*tensors, EPS)),
        },
        shapes=((16384, 4096),),
        small=(256, 1024),
        tiny=(16, 64),
        amount=_bytes_of_first,
        passes=_ROW_NORM_PASSES,
    ),
    Op(
        name="rope",
        title="RoPE",
        inputs=_rotary_inputs,
        exact=_eager_rotary,
        contenders={
            "ours": ours("apply_rotary"),
            "eager": Contender(_eager_rotary),
            "liger": liger_kernel("liger_rope"),
        },
        shapes=((4, 2048, 32, 8, 128), (1, 16384, 32, 8, 128), (8, 2048, 32, 32, 256)),
        small=(1, 256, 8, 8, 128),
        tiny=(1, 16, 2, 1, 32),
        amount=lambda q, k, cos, sin: q.nbytes + k.nbytes,
        passes={"forward": 2, "backward": 2, "both": 4},
        label="B{} T{} H{}/{} D{}".format,
        sweep=Sweep(
            "hidden size (heads of 128)",
            _HIDDEN_SIZES,
            lambda hidden_size: (4, 2048, hidden_size // 128, 8, 128),
            "4x2048 tokens, 8 key heads",
        ),
    ),
    *(
        Op(
            name=name,
            title=title,
            inputs=_gated_inputs,
            exact=eager,
            contenders={"ours": call, "eager": Contender(eager), "liger": published},
            shapes=((16384, 14336), (4096, 11008)),
            small=(256, 1024),
            tiny=(16, 64),
            amount=_bytes_of_first,
            passes=_GATED_PASSES,
            sweep=Sweep(
                "sequence length",
                (2048, 4096, 8192, 16384),
                lambda seq_len: (seq_len, 14336),
                "intermediate size 14336",
            ),
        )
        for name, title, call, eager, published in (
            ("silu_mul", "SwiGLU", ours("silu_mul"), _eager_silu_mul, liger_kernel("liger_swiglu")),
            (
                "silu_mul_scaled",
                "SwiGLU, scaled gate",
                ours("silu_mul", lambda f, gate, up: f(gate, up, gate_multiplier=0.75)),
                _eager_scaled_silu_mul,
                Contender(lambda f, gate, up: f.apply(gate, up, 0.75), "liger_kernel.ops.swiglu:LigerSiLUMulFunction"),
            ),
            (
                "gelu_mul",
                "GeGLU",
                ours("gelu_mul", lambda f, gate, up: f(gate, up, approximate="tanh")),
                _eager_gelu_mul,
                liger_kernel("liger_geglu"),
            ),
        )
    ),
    Op(
        name="relu_squared",
        title="Squared ReLU",
        inputs=_activation_inputs,
        exact=_eager_relu_squared,
        contenders={
            "ours": ours("relu_squared"),
            "eager": Contender(_eager_relu_squared),
            "liger": liger_kernel("liger_relu_squared"),
        },
        shapes=((16384, 14336),),
        small=(256, 1024),
        tiny=(16, 64),
        amount=_bytes_of_first,
        passes=_ROW_NORM_PASSES,
    ),
    *(
        Op(
            name=name,
            title=name.capitalize(),
            inputs=_activation_inputs,
            exact=eager,
            contenders={"ours": ours(name), "eager": Contender(eager), "liger": liger_kernel(f"liger_{name}")},
            shapes=((16384, 4096), (4096, 32768)),
            small=(256, 1024),
            tiny=(16, 64),
            amount=_bytes_of_first,
            passes=_ROW_NORM_PASSES,
        )
        for name, eager in (("softmax", _eager_softmax), ("sparsemax", _eager_sparsemax))
    ),
    *LAYER_OPS,
    Op(
        name="cross_entropy",
        title="Cross entropy",
        inputs=_logits_inputs,
        exact=F.cross_entropy,
        contenders={
            "ours": ours("cross_entropy"),
            "ours, in place": ours("cross_entropy", lambda f, x, labels: f(x, labels, inplace_backward=True)),
            "eager": Contender(_eager_cross_entropy),
            "torch": pytorch("cross_entropy"),
            "liger": liger_kernel("liger_cross_entropy"),
        },
        shapes=((16384, 32768), (16384, 131072), (8192, 151936)),
        small=(256, 1024),
        tiny=(16, 64),
        amount=_bytes_of_first,
        passes={"both": 2},  # read once, written once, in either direction
        sweep=Sweep("vocabulary", (40960, 81920, 122880, 163840), lambda vocab_size: (8192, vocab_size), "8192 tokens"),
    ),
    Op(
        name="tiled_mlp",
        title="MLP in tiles",
        inputs=_mlp_inputs,
        exact=_eager_mlp,
        contenders={
            "ours": Contender(
                lambda f, x, *weights: f(_MLP(*weights), x, tile_size=x.shape[0] // 4), "lightning_liger:run_tiled"
            ),
            "eager": Contender(_eager_mlp),  # keeps what is between the products
            "liger": Contender(
                lambda f, x, *weights: f(lambda mlp, tile: mlp(tile), _MLP(*weights), x, 4),
                "liger_kernel.ops.tiled_mlp:apply_tiled_mlp",
            ),
        },
        shapes=((32768, 4096, 14336),),
        small=(256, 1024, 2048),
        tiny=(16, 64, 96),
        rate="matrix",
        amount=lambda x, *weights: 2 * x.shape[0] * weights[0].numel(),
        passes={"both": 9},  # of a product; tiles compute two of them again
        split=False,
    ),
    Op(
        name="token_log_probs",
        title="Log-probabilities and entropies",
        inputs=_scores_inputs,
        exact=_eager_scores,
        contenders={  # liger-kernel has none
            "ours": ours(
                "token_log_probs", lambda f, *tensors: tuple(f(*tensors, outputs=("log_probs", "entropy"))[:2])
            ),
            "eager": Contender(_eager_scores),
        },
        shapes=((8192, 131072),),
        small=(256, 1024),
        tiny=(16, 64),
        amount=_bytes_of_first,
        passes={"forward": 1, "backward": 2, "both": 3},
    ),
    *(
        Op(
            name=kind,
            title=title,
            inputs=_distillation_inputs,
            exact=functools.partial(_eager_divergence, kind=kind),
            contenders={
                "ours": ours("divergence", functools.partial(_divergence, kind=kind)),
                "eager": Contender(functools.partial(_eager_divergence, kind=kind)),
                "liger": liger_kernel(published, call),
            },
            shapes=((4096, 131072),),
            small=(256, 1024),
            tiny=(16, 64),
            amount=_bytes_of_first,
            passes={"both": 3},  # both models' logits are read, a gradient is written
        )
        for kind, title, published, call in (
            ("forward_kl", "KL divergence", "liger_kl_div", _liger_kl),
            ("jsd", "Jensen-Shannon divergence", "liger_jsd", _liger_log_probs),
            ("total_variation", "Total variation distance", "liger_tvd", _liger_probs),
        )
    ),
)

OPS = {op.name: op for op in _OPS}
