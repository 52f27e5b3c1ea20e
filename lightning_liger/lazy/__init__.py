"""Logits that are not computed until something needs all of them at once."""
