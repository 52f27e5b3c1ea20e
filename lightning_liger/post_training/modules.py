"""Finished LightningModules of preference losses and policy gradients, so that a yaml file is a whole program."""

from lightning_liger.losses.cpo import CPOOptions
from lightning_liger.losses.dpo import DPOOptions
from lightning_liger.losses.kto import KTOOptions
from lightning_liger.losses.orpo import ORPOOptions
from lightning_liger.losses.policy_options import PolicyOptions
from lightning_liger.losses.tpo import TPOOptions
from lightning_liger.post_training.causal_lm import ReferenceCausalLM, takes
from lightning_liger.post_training.policy import LigerPolicyMixin
from lightning_liger.post_training.preference import LigerPreferenceMixin


class PreferenceModule(LigerPreferenceMixin, ReferenceCausalLM):
    """A causal language model with a preference loss."""


@takes(preference_loss=DPOOptions)
class LigerDPO(PreferenceModule):
    """Direct preference optimization of a Hugging Face causal language model.

    Data are pairs, see :class:`~lightning_liger.post_training.preference.LigerPreferenceMixin`. Formulas and papers of
    the losses: :mod:`lightning_liger.losses.dpo`.

    Arguments are the options of :class:`~lightning_liger.DPOOptions`; ``reference``, ``disable_dropout``,
    ``sync_ref_model``, ``precompute_ref_log_probs`` and other attributes of
    :class:`~lightning_liger.post_training.preference.LigerPreferenceMixin`; the model, ``lora``, the optimizer and its
    schedule as in :class:`~lightning_liger.LigerCausalLM`. A usual ``learning_rate`` is 1e-6.

    Raises:
        FileNotFoundError: If ``pretrained`` is not a folder with a ``config.json``.
        ModuleNotFoundError: If ``lora`` is given and peft is not installed.
        TypeError: For an argument of a wrong type.
        ValueError: For an argument out of its range, and combinations that have no meaning.
    """


@takes(preference_loss=CPOOptions)
class LigerCPO(PreferenceModule):
    """CPO, SimPO or AlphaPO of a Hugging Face causal language model, without a reference model.

    Data are pairs. Formulas and papers of the losses: :mod:`lightning_liger.losses.cpo`. Arguments are the options of
    :class:`~lightning_liger.CPOOptions`, and others as in :class:`LigerDPO`.
    """


@takes(preference_loss=ORPOOptions)
class LigerORPO(PreferenceModule):
    """ORPO of a Hugging Face causal language model, without a reference model.

    Data are pairs. Formula and paper: :mod:`lightning_liger.losses.orpo`. Arguments are the options of
    :class:`~lightning_liger.ORPOOptions`, and others as in :class:`LigerDPO`.
    """


@takes(preference_loss=TPOOptions)
class LigerTPO(PreferenceModule):
    """TPO of a Hugging Face causal language model: pairs and a reference completion, without a reference model.

    Formulas and paper: :mod:`lightning_liger.losses.tpo`. Arguments are the options of
    :class:`~lightning_liger.TPOOptions`, and others as in :class:`LigerDPO`.
    """


@takes(preference_loss=KTOOptions)
class LigerKTO(PreferenceModule):
    """KTO, APO-zero or BCO of a Hugging Face causal language model: completions labeled good or bad.

    Formulas and papers: :mod:`lightning_liger.losses.kto`. Arguments are the options of
    :class:`~lightning_liger.KTOOptions`, and others as in :class:`LigerDPO`.
    """


@takes(policy_options=PolicyOptions)
class LigerGRPO(LigerPolicyMixin, ReferenceCausalLM):
    """GRPO and its variants for a Hugging Face causal language model, on completions with advantages from a file.

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
