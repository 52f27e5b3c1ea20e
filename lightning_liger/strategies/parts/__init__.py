"""Mixins and helper functions that the strategies share."""
