"""Options of policy-gradient losses, by the names and with the defaults of TRL's ``GRPOConfig``."""

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from liger_ops.arguments import wrong_value
from lightning_liger.losses.options import Count, Limits, NonNegative, Options, Positive

PolicyLoss = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo", "rloo"]
SamplingMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
LOSS_TYPES, SAMPLING_MODES = get_args(PolicyLoss), get_args(SamplingMode)
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Loss types whose tokens have PPO's clipped objective; they differ in the reduction."""
OF_SEQUENCES = ("rloo",)
"""Loss types with one loss a completion, which has no tokens to mask or weight."""


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(Options):
    """A policy-gradient loss. Names and defaults are those of TRL 1.16's ``GRPOConfig``.

    PPO is ``loss_type="bnpo"`` (a mean over tokens) or ``"grpo"`` with advantages for each token; GSPO is
    ``importance_sampling_level="sequence"`` with ``loss_type="grpo"``.

    Args:
        loss_type: ``"grpo"`` (arXiv:2402.03300), ``"bnpo"``, ``"dr_grpo"`` (arXiv:2503.20783), ``"dapo"``
            (arXiv:2503.14476), ``"luspo"`` (arXiv:2602.05261), ``"cispo"`` (arXiv:2506.13585), ``"sapo"``
            (arXiv:2511.20347), ``"vespo"`` (arXiv:2602.10693) or ``"rloo"`` (arXiv:2402.14740).
        beta: Coefficient of the KL penalty; 0 needs no reference. RLOO has the penalty in the reward.
        epsilon: The ratio is clipped below 1 - epsilon. None is 0.2.
        epsilon_high: The ratio is clipped above 1 + epsilon_high; None is epsilon. For CISPO the bound of the ratio
            itself, such as 5.0, which has no default.
        delta: Upper bound of the ratio where advantages are negative (two-sided clipping, arXiv:2505.07291), above
            1 + epsilon_high.
        importance_sampling_level: ``"token"``, or ``"sequence"``: the geometric mean of the ratios of a completion's
            tokens (GSPO, arXiv:2507.18071).
        use_bias_correction_kl: Whether the divergence is multiplied by the ratio, gradient included.
        top_entropy_quantile: Share of tokens, those of the highest entropy, that the policy trains on
            (arXiv:2506.01939).
        entropy_coef: Coefficient of the entropy bonus.
        off_policy_mask_threshold: Completions of negative advantage are masked if the mean of sampling minus policy
            log-probability is above it (arXiv:2512.02556, equation 9). None masks none.
        vllm_importance_sampling_correction: Whether losses are multiplied by the ratio of old to sampling probability
            where the batch has ``sampling_per_token_logps``.
        vllm_importance_sampling_mode: ``"token_truncate"``, ``"token_mask"``, ``"sequence_truncate"`` or
            ``"sequence_mask"``: the ratio of a token or of a completion, clamped to the bounds or 0 outside them.
        vllm_importance_sampling_clip_max: Upper bound of that ratio.
        vllm_importance_sampling_clip_min: Lower bound of that ratio.
        sapo_temperature_pos: SAPO's temperature for tokens with positive advantage.
        sapo_temperature_neg: SAPO's temperature for the other tokens.
        vespo_k_pos: VESPO's exponent of the ratio where the advantage is not negative.
        vespo_lambda_pos: VESPO's decay in that case.
        vespo_k_neg: VESPO's exponent where the advantage is negative.
        vespo_lambda_neg: VESPO's decay in that case.
        max_completion_length: Tokens that each completion counts as for ``"dr_grpo"``, which needs it.
    """

    loss_type: PolicyLoss = "dapo"
    beta: NonNegative = 0.0
    epsilon: Positive | None = None
    epsilon_high: Positive | None = None
    delta: Positive | None = None
    importance_sampling_level: Literal["token", "sequence"] = "token"
    use_bias_correction_kl: bool = True
    top_entropy_quantile: Annotated[float, Limits(above=0, at_most=1)] = 1.0
    entropy_coef: NonNegative = 0.0
    off_policy_mask_threshold: float | None = None
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: SamplingMode = "sequence_mask"
    vllm_importance_sampling_clip_max: NonNegative | None = 3.0
    vllm_importance_sampling_clip_min: NonNegative | None = None
    sapo_temperature_pos: Positive = 1.0
    sapo_temperature_neg: Positive = 1.05
    vespo_k_pos: NonNegative = 2.0
    vespo_lambda_pos: NonNegative = 3.0
    vespo_k_neg: NonNegative = 3.0
    vespo_lambda_neg: NonNegative = 2.0
    max_completion_length: Count | None = None

    epsilon_low: float = field(init=False, repr=False)
    """Bound below: ``epsilon`` or its default."""
    bound_high: float = field(init=False, repr=False)
    """Bound above: ``epsilon_high``, or the bound below."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon_low", self.epsilon or 0.2)
        object.__setattr__(self, "bound_high", self.epsilon_high or self.epsilon_low)
        super().__post_init__()
        kind, is_rloo, highest = self.loss_type, self.loss_type in OF_SEQUENCES, 1 + self.bound_high
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        corrects, mode = self.vllm_importance_sampling_correction, self.vllm_importance_sampling_mode
        bound = "the upper bound of the ratio itself, such as 5.0, not of its distance from 1"
        rules: list[tuple[bool, str, str]] = [
            (kind == "cispo" and self.epsilon_high is None, "epsilon_high", f"set for loss_type='cispo', {bound}"),
            (kind == "dr_grpo" and self.max_completion_length is None,
             "max_completion_length", "set for loss_type='dr_grpo', which divides by it"),
            (self.delta is not None and kind not in CLIPPED,
             "delta", f"None for loss_type={kind!r}, which does not clip by it"),
            (self.delta is not None and self.delta <= highest,
             "delta", f"above 1 + epsilon_high = {highest}, the bound that it widens"),
            (self.importance_sampling_level == "sequence" and kind in ("vespo", *OF_SEQUENCES),
             "importance_sampling_level", f"'token' for loss_type={kind!r}, which has ratios of completions"),
            (is_rloo and self.beta > 0,
             "beta", "0 for loss_type='rloo', whose penalty is part of the reward (see leave_one_out_advantages)"),
            (is_rloo and self.top_entropy_quantile < 1,
             "top_entropy_quantile", "1 for loss_type='rloo', whose ratio is that of all tokens"),
            (is_rloo and self.off_policy_mask_threshold is not None,
             "off_policy_mask_threshold", f"None for loss_type={kind!r}"),
            (corrects and low is not None and high is not None and low >= high,
             "vllm_importance_sampling_clip_min", f"below vllm_importance_sampling_clip_max = {high}"),
            (corrects and low is None and high is None and mode.endswith("truncate"),
             "vllm_importance_sampling_clip_max", f"set for vllm_importance_sampling_mode={mode!r}, or clip_min"),
        ]  # fmt: skip
        for is_broken, name, expected in rules:
            if is_broken:
                raise wrong_value(name, expected, getattr(self, name))

    @property
    def counts_tokens(self) -> bool:
        """Whether the loss is a mean over tokens, not over completions."""
        return self.loss_type in ("bnpo", "dapo", "cispo", "vespo")
