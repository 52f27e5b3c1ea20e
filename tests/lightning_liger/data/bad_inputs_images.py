"""Wrong arguments, records and images of ImageTextDataModule."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_liger.data import ImageTextDataModule
from tests.bad_inputs import BadInput

EXAMPLES = Path(__file__).parents[3] / "examples" / "data"
PLAIN = {"tokenizer": str(EXAMPLES / "tokenizer"), "image_size": 8, "tokens_per_image": 3}
GOOD: dict[str, Any] = {"image": str(EXAMPLES / "images" / "00.ppm"), "prompt": "a", "completion": "b"}


def makes(**changed: Any) -> Callable[[], Any]:
    return lambda: ImageTextDataModule(**{"path": EXAMPLES / "images", "processor": PLAIN, **changed})


def reads(changed: dict[str, Any]) -> Callable[[Path], Any]:
    def call(tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text(json.dumps(GOOD) + "\n" + json.dumps({**GOOD, **changed}), encoding="utf-8")
        ImageTextDataModule(path=tmp_path, processor=PLAIN, batch_size=1).setup()

    return call


BAD_INPUTS = [
    BadInput("path", makes(path="/no/such"), ("data.path", "/no/such"), FileNotFoundError),
    BadInput("validation_fraction", makes(validation_fraction=1), ("data.validation_fraction", "1")),
    BadInput("max_length", makes(max_length=1), ("data.max_length", "at least 2")),
    BadInput("batch_size", makes(batch_size=0), ("data.batch_size", "at least 1")),
    BadInput("processor-type", makes(processor=5), ("data.processor", "5")),
    BadInput("processor-keys", makes(processor={"size": 8}), ("data.processor", "image_size", "size")),
    BadInput("processor-size", makes(processor=PLAIN | {"image_size": 0}), ("image_size", "at least 1", "0")),
    BadInput("record-image", reads({"image": None}), ("a.jsonl, line 2", "'image'", "None")),
    BadInput("record-no file", reads({"image": "no.ppm"}), ("a.jsonl, line 2", "no.ppm"), FileNotFoundError),
    BadInput("record-prompt", reads({"prompt": 5}), ("a.jsonl, line 2", "'prompt'", "5")),
]
