"""Log-probabilities, entropies and other scores of a linear head's tokens, without materialized logits."""
