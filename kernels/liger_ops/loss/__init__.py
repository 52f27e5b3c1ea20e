"""Cross entropy of logits, and of a linear head whose logits are never materialized."""
