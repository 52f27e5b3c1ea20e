"""Images with prompts and completions, for models of images and text."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import AutoProcessor
from typing_extensions import override

from liger_ops import IGNORE_INDEX
from liger_ops.arguments import check_integer, check_text, shown, wrong_value
from lightning_liger.data.collate import Batch, Layout
from lightning_liger.data.module import BatchesDataModule, Split
from lightning_liger.data.records import Record, read_records
from lightning_liger.data.tokenizer import load_tokenizer, pretrained_folder


@dataclass(frozen=True)
class ImageTextCollator:
    """Collates examples with ``images``, ``prompt`` and ``completion``, by the processor of a model.

    A batch has ``input_ids``, ``labels`` (not shifted, -100 at all but tokens of completions) and ``attention_mask``,
    each ``[batch_size, seq_len]`` in int64 and padded on the right, and what the processor makes of the images, such as
    ``pixel_values``. An end-of-sequence token follows each completion.

    Args:
        processor: Called with ``text`` (a list of prompts) and ``images`` (a list of images for each).
        max_length: The maximum number of tokens of a sequence. Completions lose their end; None keeps all.
    """

    processor: Any
    max_length: int | None = None

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        tokenizer = self.processor.tokenizer
        images = [[load_image(source) for source in each["images"]] for each in examples]
        # A chat template has the special tokens already.
        options = {} if self.processor.chat_template is None else {"add_special_tokens": False}
        prompts = [self._prompt(each) for each in examples]
        encoded = self.processor(text=prompts, images=images, padding=True, return_tensors="pt", **options)
        mask = encoded["attention_mask"].bool()
        columns = {  # of each token of the prompts, such as whether it stands for an image
            key: [row[kept].numpy() for row, kept in zip(value, mask, strict=True)]
            for key, value in encoded.items()
            if isinstance(value, Tensor) and value.shape == mask.shape and key != "attention_mask"
        }
        texts = [each["completion"] for each in examples]
        completions = [
            np.array([*ids, tokenizer.eos_token_id]) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]
        ]
        columns["labels"] = [np.full(len(row), IGNORE_INDEX) for row in columns["input_ids"]]
        if self.max_length is not None and (longest := max(map(len, columns["labels"]))) >= self.max_length:
            raise wrong_value("data.max_length", f"more than the {longest} tokens of a prompt", self.max_length)
        for key, rows in columns.items():
            ends = completions if key in ("input_ids", "labels") else [np.zeros_like(each) for each in completions]
            columns[key] = [np.concatenate(parts)[: self.max_length] for parts in zip(rows, ends, strict=True)]
        end = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        return {key: value for key, value in encoded.items() if key not in columns} | Layout(end).batch(columns)

    def _prompt(self, example: Mapping[str, Any]) -> str:
        """The prompt with its images first, unless it says where they are."""
        prompt, token = example["prompt"], getattr(self.processor, "image_token", None)
        if token is not None and token in prompt:
            return str(prompt)
        if self.processor.chat_template is None:
            return f"{(token or '') * len(example['images'])}\n{prompt}"
        content = [*({"type": "image"} for _ in example["images"]), {"type": "text", "text": prompt}]
        messages = [{"role": "user", "content": content}]
        return str(self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


class ImageTextDataModule(BatchesDataModule):
    """Images with prompts and completions, as batches of :class:`~lightning_liger.data.ImageTextCollator`.

    A record has ``image``, the name of a file relative to the folder of the records, or ``images``, a list of them;
    ``prompt`` and ``completion``, strings. In Parquet files images may be objects with ``bytes``. The processor's chat
    template, if it has one, makes a message of the user out of the images and the prompt; without one the images stand
    before the prompt. A prompt with the processor's image tokens says itself where they are.

    Records are kept in memory. Images are read by pillow when a batch is made, with ``num_workers`` in other processes.
    Other arguments and errors are those of :class:`~lightning_liger.data.module.BatchesDataModule`.

    Args:
        path: A .jsonl, .json or .parquet file, or a folder with such files.
        processor: The pretrained model with its processor, a folder or a name on the Hub; or, for a LLaVA with random
            weights, a dict: ``tokenizer``, a Hugging Face tokenizer; ``image_size``, the rows and columns that images
            are resized to; ``tokens_per_image``, (image_size / patch_size)**2 for most models; and maybe
            ``image_token``, by default "<image>", which is added to the tokenizer.
        max_length: The maximum number of tokens of a sequence. Completions lose their end. None keeps all.
    """

    def __init__(
        self, *, path: str | Path, processor: str | dict[str, Any], max_length: int | None = None, **settings: Any
    ) -> None:
        super().__init__(path=path, **settings)
        check_integer("data.max_length", max_length, at_least=2, optional=True)
        self.max_length = max_length
        self.processor: Any = _load_processor(processor)
        self.text_tokenizer = self.processor.tokenizer

    @override
    def _read(self, split: Split) -> list[dict[str, Any]]:
        setting = self._place(split)[0]
        return [_row(record, file.parent) for file in self._files(split) for record in read_records(setting, [file])]

    @override
    def _collator(self, split: Split) -> ImageTextCollator:
        return ImageTextCollator(self.processor, self.max_length)


def load_image(source: Path | bytes) -> Any:
    """An image of a file or of its content, as pillow reads it: ``[height, width, 3]``, red, green and blue."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ModuleNotFoundError("images need pillow: pip install 'lightning-liger[vision]'") from error
    try:
        return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source).convert("RGB")
    except (OSError, ValueError, IndexError) as error:
        named = "an image" if isinstance(source, bytes) else source
        raise ValueError(f"{named} is not a readable image: {error}") from error


def _load_processor(processor: Any) -> Any:
    if isinstance(processor, Mapping):
        needed = {"tokenizer", "image_size", "tokens_per_image"}
        if needed <= processor.keys() <= needed | {"image_token"}:
            return _plain_processor(**processor)
        raise wrong_value("data.processor", f"a folder, or a dict with {', '.join(sorted(needed))}", processor)
    folder = pretrained_folder("data.processor", processor)
    try:
        loaded = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # which types a broken processor raises is not documented
        raise ValueError(f"data.processor={str(processor)!r} could not be loaded by AutoProcessor: {error}") from error
    if getattr(loaded, "tokenizer", None) is None or not hasattr(loaded, "image_processor"):
        raise wrong_value("data.processor", "the processor of a vision-language model", str(processor))
    return loaded


def _plain_processor(tokenizer: Any, image_size: int, tokens_per_image: int, image_token: str = "<image>") -> Any:
    """LLaVA's processor of images that become a square of ``image_size``, with values from -1 to 1."""
    from transformers import CLIPImageProcessor, LlavaProcessor  # need pillow

    check_integer("data.processor['image_size']", image_size, at_least=1)
    check_integer("data.processor['tokens_per_image']", tokens_per_image, at_least=1)
    check_text("data.processor['image_token']", image_token)
    loaded = load_tokenizer(tokenizer)
    loaded.add_special_tokens({"additional_special_tokens": [image_token]})
    loaded.pad_token = loaded.pad_token or loaded.eos_token
    size, half = {"height": image_size, "width": image_size}, [0.5, 0.5, 0.5]
    return LlavaProcessor(
        CLIPImageProcessor(size=size, crop_size=size, image_mean=half, image_std=half),
        loaded,
        patch_size=image_size,
        num_additional_image_tokens=tokens_per_image - 1,  # to the one patch
        vision_feature_select_strategy="full",
        image_token=image_token,
    )


def _row(record: Record, folder: Path) -> dict[str, Any]:
    images = record.items("images") if record.has("images") else [record.values.get("image")]
    sources = [_source(record, image, folder) for image in images]
    return {"images": sources, "prompt": record.text("prompt"), "completion": record.text("completion")}


def _source(record: Record, image: Any, folder: Path) -> Path | bytes:
    if isinstance(image, Mapping) and isinstance(image.get("bytes"), bytes):
        return image["bytes"]
    name = image.get("path") if isinstance(image, Mapping) else image
    if not isinstance(name, str) or not name:
        raise record.error(f"the field 'image' must be the name of a file, or an object with bytes, got {shown(image)}")
    if not (file := folder / name).is_file():
        raise FileNotFoundError(f"{record.place}: the image {str(file)!r} does not exist")
    return file
