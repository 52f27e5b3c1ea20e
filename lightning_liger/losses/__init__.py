"""Losses as functions of vectors: log-probabilities of tokens and sequences in, losses and metrics out."""
