"""Attention backends that there are not."""

from functools import partial

from lightning_liger.attention import AttentionBackend
from tests.bad_inputs import BadInput

WRONG = {"unknown": "cuda", "capital": "Flash", "number": 1, "bool": True, "several": ("flash", "cudnn")}

BAD_INPUTS = [
    BadInput(
        f"AttentionBackend-backend-{kind}",
        partial(AttentionBackend, value),  # type: ignore[arg-type]
        ("attention_backend must be one of", "'cudnn'", repr(value)),
    )
    for kind, value in WRONG.items()
]
