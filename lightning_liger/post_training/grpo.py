"""A finished LightningModule of policy gradients on given completions, so that a yaml file is a whole program."""

from typing import Any

from lightning_liger.losses.policy_options import PolicyOptions
from lightning_liger.post_training.causal_lm import ReferenceCausalLM, options_of, plain
from lightning_liger.post_training.policy import LigerPolicyMixin


class LigerGRPO(LigerPolicyMixin, ReferenceCausalLM):
    """GRPO and its kin for a Hugging Face causal language model, on completions with advantages from a file.

    Data are groups of completions with rewards or advantages, see
    :class:`~lightning_liger.post_training.policy.LigerPolicyMixin`. Formulas and papers of the losses:
    :mod:`lightning_liger.losses.policy`. Names and defaults are those of TRL's ``GRPOConfig``.

    Args:
        loss_type: ``"grpo"``, ``"bnpo"``, ``"dr_grpo"``, ``"dapo"``, ``"luspo"``, ``"cispo"``, ``"sapo"``,
            ``"vespo"`` or ``"rloo"``.
        beta: Weight of the divergence from the reference model in the loss; 0 needs no reference.
        epsilon: The ratio is clipped below 1 - epsilon. None is 0.2.
        epsilon_high: The ratio is clipped above 1 + epsilon_high; None is epsilon. For CISPO the bound of the ratio
            itself, such as 5.0, which has no default.
        delta: Upper bound of the ratio where advantages are negative; None for none.
        importance_sampling_level: ``"token"``, or ``"sequence"`` for GSPO.
        use_bias_correction_kl: Whether the divergence is multiplied by the ratio.
        top_entropy_quantile: Share of tokens, those of the highest entropy, that the policy trains on.
        entropy_coef: Weight of the mean entropy that the loss rewards.
        off_policy_mask_threshold: Completions of negative advantage that are further from the policy are left out.
        vllm_importance_sampling_correction: Whether losses are multiplied by the ratio of old to sampling probability
            where the data have ``sampling_per_token_logps``.
        vllm_importance_sampling_mode: ``"token_truncate"``, ``"token_mask"``, ``"sequence_truncate"`` or
            ``"sequence_mask"``.
        vllm_importance_sampling_clip_max: Upper bound of that ratio.
        vllm_importance_sampling_clip_min: Lower bound of that ratio.
        sapo_temperature_pos: SAPO's temperature of tokens of positive advantage.
        sapo_temperature_neg: SAPO's temperature of others.
        vespo_k_pos: VESPO's exponent of the ratio where the advantage is not negative.
        vespo_lambda_pos: VESPO's decay there.
        vespo_k_neg: VESPO's exponent where the advantage is negative.
        vespo_lambda_neg: VESPO's decay there.
        max_completion_length: Tokens that each completion counts as for ``"dr_grpo"``, which needs it.
        steps_per_generation: Micro-batches that the data's ``num_items_in_batch`` is spread over; None is the number of
            an optimizer step.
        temperature: That completions were sampled with; logits are divided by it. Also that of ``predict``.
        disable_dropout: Whether the model is trained without dropout.
        **kwargs: ``lora`` and ``reference`` as in :class:`~lightning_liger.LigerDPO`; the model, the optimizer and its
            schedule as in :class:`~lightning_liger.LigerCausalLM`. A usual ``learning_rate`` is 1e-6.

    Raises:
        FileNotFoundError: If ``pretrained`` is no folder with a ``config.json``.
        ModuleNotFoundError: If ``lora`` is given and peft is not installed.
        TypeError: For an argument of a wrong type.
        ValueError: For an argument out of its range, and combinations that have no meaning.
    """

    def __init__(
        self,
        loss_type: str = "dapo",
        beta: float = 0.0,
        epsilon: float | None = None,
        epsilon_high: float | None = None,
        delta: float | None = None,
        importance_sampling_level: str = "token",
        use_bias_correction_kl: bool = True,
        top_entropy_quantile: float = 1.0,
        entropy_coef: float = 0.0,
        off_policy_mask_threshold: float | None = None,
        vllm_importance_sampling_correction: bool = True,
        vllm_importance_sampling_mode: str = "sequence_mask",
        vllm_importance_sampling_clip_max: float | None = 3.0,
        vllm_importance_sampling_clip_min: float | None = None,
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        max_completion_length: int | None = None,
        steps_per_generation: int | None = None,
        temperature: float = 1.0,
        disable_dropout: bool = False,
        **kwargs: Any,
    ) -> None:
        self.policy_options = options_of(PolicyOptions, locals())
        self.steps_per_generation = steps_per_generation
        self.temperature = temperature
        kwargs = plain(kwargs)
        super().__init__(temperature=temperature, disable_dropout=disable_dropout, **kwargs)
        self.save_hyperparameters()
