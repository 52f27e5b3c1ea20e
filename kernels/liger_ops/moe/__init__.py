"""Mixtures of experts: the index of tokens by expert, grouped products that gather in their loads, and their sums."""
