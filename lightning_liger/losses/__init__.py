"""Losses as functions of per-token and per-sequence quantities."""
