"""Rows of tokens: documents packed into a row, and rows split over ranks."""
