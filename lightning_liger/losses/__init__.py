"""Losses after pretraining: functions of log-probabilities of tokens or completions, which know nothing of logits."""
