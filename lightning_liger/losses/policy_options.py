"""Options of policy-gradient losses, by the names and with the defaults of TRL's ``GRPOConfig``."""

from dataclasses import dataclass, field

from liger_ops.arguments import check_bool, check_choice, check_integer, check_number

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Loss types whose tokens have PPO's clipped objective; they differ in the reduction."""
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo", "rloo")
OF_SEQUENCES = ("rloo",)
"""Loss types with one loss a completion, which has no tokens to mask or weight."""
SAMPLING_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
_LEVELS = ("token", "sequence")


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """A policy-gradient loss. Names and defaults are those of TRL 1.16's ``GRPOConfig``.

    PPO is ``loss_type="bnpo"`` (a mean over tokens) or ``"grpo"`` with advantages for each token; GSPO is
    ``importance_sampling_level="sequence"`` with ``loss_type="grpo"``.

    Args:
        loss_type: ``"grpo"`` (arXiv:2402.03300), ``"bnpo"``, ``"dr_grpo"`` (arXiv:2503.20783), ``"dapo"``
            (arXiv:2503.14476), ``"luspo"`` (arXiv:2602.05261), ``"cispo"`` (arXiv:2506.13585), ``"sapo"``
            (arXiv:2511.20347), ``"vespo"`` (arXiv:2602.10693) or ``"rloo"`` (arXiv:2402.14740).
        beta: Weight of the divergence from the reference in the loss; 0 needs no reference. RLOO has it in the reward.
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
        entropy_coef: Weight of the mean entropy that the loss rewards.
        off_policy_mask_threshold: Completions of negative advantage are left out if the mean of sampling minus policy
            log-probability is above it (arXiv:2512.02556, equation 9). None leaves out none.
        vllm_importance_sampling_correction: Whether losses are multiplied by the ratio of old to sampling probability
            where the batch has ``sampling_per_token_logps``.
        vllm_importance_sampling_mode: ``"token_truncate"``, ``"token_mask"``, ``"sequence_truncate"`` or
            ``"sequence_mask"``: the ratio of a token or of a completion, clamped to the bounds or 0 outside them.
        vllm_importance_sampling_clip_max: Upper bound of that ratio.
        vllm_importance_sampling_clip_min: Lower bound of that ratio.
        sapo_temperature_pos: SAPO's temperature of tokens of positive advantage.
        sapo_temperature_neg: SAPO's temperature of others.
        vespo_k_pos: VESPO's exponent of the ratio where the advantage is not negative.
        vespo_lambda_pos: VESPO's decay there.
        vespo_k_neg: VESPO's exponent where the advantage is negative.
        vespo_lambda_neg: VESPO's decay there.
        max_completion_length: Tokens that each completion counts as for ``"dr_grpo"``, which needs it.

    Raises:
        TypeError: For an option of a wrong type.
        ValueError: For an option out of its range, and for options that do not fit together.
    """

    loss_type: str = "dapo"
    beta: float = 0.0
    epsilon: float | None = None
    epsilon_high: float | None = None
    delta: float | None = None
    importance_sampling_level: str = "token"
    use_bias_correction_kl: bool = True
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    off_policy_mask_threshold: float | None = None
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    max_completion_length: int | None = None

    epsilon_low: float = field(init=False, repr=False)
    """Bound below: ``epsilon`` or its default."""
    bound_high: float = field(init=False, repr=False)
    """Bound above: ``epsilon_high``, or the bound below."""

    def __post_init__(self) -> None:
        check_choice("loss_type", self.loss_type, LOSS_TYPES)
        check_choice("importance_sampling_level", self.importance_sampling_level, _LEVELS)
        check_choice("vllm_importance_sampling_mode", self.vllm_importance_sampling_mode, SAMPLING_MODES)
        for name in ("use_bias_correction_kl", "vllm_importance_sampling_correction"):
            check_bool(name, getattr(self, name))
        check_number("beta", self.beta, at_least=0)
        for name in ("epsilon", "epsilon_high"):
            check_number(name, getattr(self, name), above=0, optional=True)
        check_number("delta", self.delta, above=0, optional=True)
        check_number("top_entropy_quantile", self.top_entropy_quantile, above=0, at_most=1)
        check_number("entropy_coef", self.entropy_coef, at_least=0)
        check_number("off_policy_mask_threshold", self.off_policy_mask_threshold, optional=True)
        for bound in ("max", "min"):
            name = f"vllm_importance_sampling_clip_{bound}"
            check_number(name, getattr(self, name), at_least=0, optional=True)
        for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
            check_number(name, getattr(self, name), above=0)
        for name in ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"):
            check_number(name, getattr(self, name), at_least=0)
        check_integer("max_completion_length", self.max_completion_length, at_least=1, optional=True)
        object.__setattr__(self, "epsilon_low", self.epsilon or 0.2)
        object.__setattr__(self, "bound_high", self.epsilon_high or self.epsilon_low)
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.loss_type == "cispo" and self.epsilon_high is None:
            raise ValueError(
                "epsilon_high must be set for loss_type='cispo', got None: it is the upper bound of the ratio itself,"
                " such as 5.0, not of its distance from 1"
            )
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            raise ValueError("max_completion_length must be set for loss_type='dr_grpo', which divides by it, got None")
        if self.delta is not None and self.loss_type not in CLIPPED:
            raise ValueError(
                f"delta must be None for loss_type={self.loss_type!r}, which does not clip by it, got {self.delta}"
            )
        if self.delta is not None and self.delta <= 1 + self.bound_high:
            raise ValueError(
                f"delta must be above 1 + epsilon_high = {1 + self.bound_high}, the bound that it widens, got"
                f" {self.delta}"
            )
        if self.importance_sampling_level == "sequence" and self.loss_type in ("vespo", *OF_SEQUENCES):
            raise ValueError(
                f"importance_sampling_level must be 'token' for loss_type={self.loss_type!r}, which forms ratios of"
                f" completions itself, got {self.importance_sampling_level!r}"
            )
        if self.loss_type == "rloo":
            if self.beta:
                raise ValueError(
                    "beta must be 0 for loss_type='rloo', whose penalty is part of the reward (see"
                    f" leave_one_out_advantages), got {self.beta}"
                )
            if self.top_entropy_quantile < 1:
                raise ValueError(
                    "top_entropy_quantile must be 1 for loss_type='rloo', whose ratio is that of all tokens, got"
                    f" {self.top_entropy_quantile}"
                )
        if self.loss_type in OF_SEQUENCES and self.off_policy_mask_threshold is not None:
            raise ValueError(
                f"off_policy_mask_threshold must be None for loss_type={self.loss_type!r}, got"
                f" {self.off_policy_mask_threshold}"
            )
        if self.vllm_importance_sampling_correction:
            self._check_sampling_bounds()

    def _check_sampling_bounds(self) -> None:
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"vllm_importance_sampling_clip_min must be below vllm_importance_sampling_clip_max = {high}, got {low}"
            )
        if low is None and high is None and self.vllm_importance_sampling_mode.endswith("truncate"):
            raise ValueError(
                "vllm_importance_sampling_clip_max or vllm_importance_sampling_clip_min must be set for"
                f" vllm_importance_sampling_mode={self.vllm_importance_sampling_mode!r}, got None for both"
            )

    @property
    def counts_tokens(self) -> bool:
        """Whether the loss is a mean over tokens, not over completions."""
        return self.loss_type in ("bnpo", "dapo", "cispo", "vespo")
