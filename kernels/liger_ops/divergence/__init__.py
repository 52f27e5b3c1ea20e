"""Divergences of a student's distribution from a teacher's, of logits and of linear heads."""
