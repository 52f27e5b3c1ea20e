"""Finished LightningModules of preference losses, so that a yaml file is a whole program."""

from typing import Any

from lightning_liger.losses.cpo import CPOOptions
from lightning_liger.losses.dpo import DPOOptions
from lightning_liger.losses.kto import KTOOptions
from lightning_liger.losses.orpo import ORPOOptions
from lightning_liger.losses.tpo import TPOOptions
from lightning_liger.post_training.causal_lm import ReferenceCausalLM, options_of, plain, refuse_loss_type
from lightning_liger.post_training.preference import LigerPreferenceMixin


class PreferenceModule(LigerPreferenceMixin, ReferenceCausalLM):
    """A causal language model with a preference loss, its reference model, and adapters if wanted.

    Args:
        precompute_ref_log_probs: Whether the reference's log-probabilities are computed for all data before training.
            There is no copy of the model then.
        ref_log_probs_folder: Where they are kept for other runs.
        **kwargs: See :class:`~lightning_liger.post_training.causal_lm.ReferenceCausalLM`.
    """

    def __init__(
        self, precompute_ref_log_probs: bool = False, ref_log_probs_folder: str | None = None, **kwargs: Any
    ) -> None:
        self.precompute_ref_log_probs = precompute_ref_log_probs
        self.ref_log_probs_folder = ref_log_probs_folder
        super().__init__(**kwargs)

    def _has_reference_model(self) -> bool:
        return not self.precompute_ref_log_probs and super()._has_reference_model()


class LigerDPO(PreferenceModule):
    """Direct preference optimization of a Hugging Face causal language model.

    Data are pairs, see :class:`~lightning_liger.post_training.preference.LigerPreferenceMixin`. Formulas and papers of
    the losses: :mod:`lightning_liger.losses.dpo`.

    Args:
        loss_type: ``"sigmoid"``, ``"hinge"``, ``"ipo"``, ``"exo_pair"``, ``"nca_pair"``, ``"robust"``, ``"bco_pair"``,
            ``"sppo_hard"``, ``"aot"``, ``"aot_unpaired"``, ``"apo_zero"``, ``"apo_down"``, ``"discopop"``, ``"sft"``
            or ``"sigmoid_norm"``; or a list of names, whose losses are added.
        loss_weights: The factor of each loss of a list.
        beta: Strength of the tie to the reference model.
        label_smoothing: The probability that a label is wrong, for the losses that use it.
        f_divergence_type: ``"reverse_kl"``, ``"forward_kl"``, ``"js_divergence"`` or ``"alpha_divergence"``.
        f_alpha_divergence_coef: Alpha of ``"alpha_divergence"``.
        ld_alpha: LD-DPO's weight of tokens that only the longer completion of a pair has; None for 1.
        use_weighting: Whether pairs are weighted by their probability (WPO).
        discopop_tau: Temperature of ``"discopop"``.
        **kwargs: ``reference``, ``sync_ref_model``, ``precompute_ref_log_probs``, ``ref_log_probs_folder``,
            ``disable_dropout`` and others of :class:`PreferenceModule`; ``lora``, the model, the optimizer and its
            schedule as in :class:`~lightning_liger.LigerCausalLM`. A usual ``learning_rate`` is 1e-6.

    Raises:
        FileNotFoundError: If ``pretrained`` is no folder with a ``config.json``.
        ModuleNotFoundError: If ``lora`` is given and peft is not installed.
        TypeError: For an argument of a wrong type.
        ValueError: For an argument out of its range, and combinations that have no meaning.
    """

    def __init__(
        self,
        loss_type: str | list[str] = "sigmoid",
        loss_weights: list[float] | None = None,
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        f_divergence_type: str = "reverse_kl",
        f_alpha_divergence_coef: float = 0.5,
        ld_alpha: float | None = None,
        use_weighting: bool = False,
        discopop_tau: float = 0.05,
        **kwargs: Any,
    ) -> None:
        self.preference_loss = options_of(DPOOptions, locals())
        kwargs = plain(kwargs)
        super().__init__(**kwargs)
        self.save_hyperparameters()


class LigerCPO(PreferenceModule):
    """CPO, SimPO or AlphaPO of a Hugging Face causal language model, without a reference model.

    Data are pairs. Formulas and papers of the losses: :mod:`lightning_liger.losses.cpo`.

    Args:
        loss_type: ``"sigmoid"``, ``"hinge"``, ``"ipo"``, ``"simpo"`` or ``"alphapo"``.
        beta: Scale of the rewards.
        cpo_alpha: Factor of the negative log-likelihood of chosen completions; SimPO needs 0.
        simpo_gamma: SimPO's target margin.
        alpha: AlphaPO's alpha; 0 for none.
        label_smoothing: The probability that a label is wrong.
        **kwargs: As in :class:`LigerDPO`.

    Raises:
        FileNotFoundError, ModuleNotFoundError, TypeError, ValueError: As :class:`LigerDPO`.
    """

    def __init__(
        self,
        loss_type: str = "sigmoid",
        beta: float = 0.1,
        cpo_alpha: float = 1.0,
        simpo_gamma: float = 0.5,
        alpha: float = 0.0,
        label_smoothing: float = 0.0,
        **kwargs: Any,
    ) -> None:
        self.preference_loss = options_of(CPOOptions, locals())
        kwargs = plain(kwargs)
        super().__init__(**kwargs)
        self.save_hyperparameters()


class LigerORPO(PreferenceModule):
    """ORPO of a Hugging Face causal language model, without a reference model.

    Data are pairs. Formula and paper: :mod:`lightning_liger.losses.orpo`.

    Args:
        beta: Factor of the odds ratio's loss.
        **kwargs: As in :class:`LigerDPO`.

    Raises:
        FileNotFoundError, ModuleNotFoundError, TypeError, ValueError: As :class:`LigerDPO`.
    """

    def __init__(self, beta: float = 0.1, **kwargs: Any) -> None:
        self.preference_loss = options_of(ORPOOptions, locals())
        refuse_loss_type(kwargs)
        kwargs = plain(kwargs)
        super().__init__(loss_type="nll", **kwargs)
        self.save_hyperparameters()


class LigerTPO(PreferenceModule):
    """TPO of a Hugging Face causal language model: pairs and a reference completion, without a reference model.

    Formulas and paper: :mod:`lightning_liger.losses.tpo`.

    Args:
        loss_type: ``"sigmoid"``, ``"hinge"``, ``"ipo"`` or ``"tpo-l"``.
        beta: Scale of the rewards.
        tpo_alpha: Factor of the negative log-likelihood of reference completions; with 0, data are pairs.
        tpo_l_gamma: Target margin of ``"tpo-l"``.
        label_smoothing: The probability that a label is wrong.
        **kwargs: As in :class:`LigerDPO`.

    Raises:
        FileNotFoundError, ModuleNotFoundError, TypeError, ValueError: As :class:`LigerDPO`.
    """

    def __init__(
        self,
        loss_type: str = "sigmoid",
        beta: float = 0.01,
        tpo_alpha: float = 1.0,
        tpo_l_gamma: float = 0.5,
        label_smoothing: float = 0.0,
        **kwargs: Any,
    ) -> None:
        self.preference_loss = options_of(TPOOptions, locals())
        kwargs = plain(kwargs)
        super().__init__(**kwargs)
        self.save_hyperparameters()


class LigerKTO(PreferenceModule):
    """KTO, APO-zero or BCO of a Hugging Face causal language model: completions labelled good or bad.

    Formulas and papers: :mod:`lightning_liger.losses.kto`.

    Args:
        loss_type: ``"kto"``, ``"apo_zero_unpaired"`` or ``"bco"``.
        beta: Strength of the tie to the reference model.
        desirable_weight: Factor of the losses of good completions.
        undesirable_weight: Factor of the losses of bad completions.
        **kwargs: As in :class:`LigerDPO`.

    Raises:
        FileNotFoundError, ModuleNotFoundError, TypeError, ValueError: As :class:`LigerDPO`.
    """

    def __init__(
        self,
        loss_type: str = "kto",
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        self.preference_loss = options_of(KTOOptions, locals())
        kwargs = plain(kwargs)
        super().__init__(**kwargs)
        self.save_hyperparameters()
