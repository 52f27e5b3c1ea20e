"""Losses of supervised fine-tuning, of each token's log-probability l under the model.

=====  ==================  ================================================================
nll    -l                  cross entropy
dft    -sg[exp(l)] l       dynamic fine-tuning (arXiv:2508.05629): tokens weighted by probability
=====  ==================  ================================================================
"""

from typing import Literal

from torch import Tensor

SFTLoss = Literal["nll", "dft"]


def dft_loss(log_probs: Tensor) -> Tensor:
    """Dynamic fine-tuning's loss of each token: its cross entropy times its probability, which has no gradient."""
    return -log_probs.detach().exp() * log_probs
