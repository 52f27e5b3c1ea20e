"""Rows of tokens: labels of packed documents, and rows sharded over ranks."""
