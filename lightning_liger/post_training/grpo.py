"""A finished LightningModule of policy gradients on given completions, so that a yaml file is a whole program."""

from lightning_liger.losses.policy_options import PolicyOptions
from lightning_liger.post_training.causal_lm import ReferenceCausalLM, takes
from lightning_liger.post_training.policy import LigerPolicyMixin


@takes(policy_options=PolicyOptions)
class LigerGRPO(LigerPolicyMixin, ReferenceCausalLM):
    """GRPO and its kin for a Hugging Face causal language model, on completions with advantages from a file.

    Data are groups of completions with rewards or advantages, see
    :class:`~lightning_liger.post_training.policy.LigerPolicyMixin`. Formulas and papers of the losses:
    :mod:`lightning_liger.losses.policy`.

    Arguments are the options of :class:`~lightning_liger.PolicyOptions`; ``temperature``, ``steps_per_generation``,
    ``reference`` and other attributes of :class:`~lightning_liger.post_training.policy.LigerPolicyMixin`
    (``temperature`` is also that of ``predict``); the model, ``lora``, the optimizer and its schedule as in
    :class:`~lightning_liger.LigerCausalLM`. A usual ``learning_rate`` is 1e-6.

    Raises:
        FileNotFoundError, ModuleNotFoundError, TypeError, ValueError: As :class:`~lightning_liger.LigerDPO`.
    """
