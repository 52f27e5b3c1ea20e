"""Images with texts: only completions are learned, and each row has its own image."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_liger.data import ImageTextCollator, ImageTextDataModule
from lightning_liger.data.images import PlainProcessor, load_image

pytest.importorskip("PIL")
EXAMPLES = Path(__file__).parents[3] / "examples" / "data"
PLAIN = {"tokenizer": str(EXAMPLES / "tokenizer"), "image_size": 8, "tokens_per_image": 3}


def write_image(file: Path, value: int, size: tuple[int, int] = (4, 6)) -> bytes:
    pixels = np.full((*size, 3), value, dtype=np.uint8)
    content = f"P6\n{size[1]} {size[0]}\n255\n".encode() + pixels.tobytes()
    file.write_bytes(content)
    return content


@pytest.fixture
def records(tmp_path):
    for value in range(4):
        write_image(tmp_path / f"{value}.ppm", 60 * value)
    rows = [{"image": f"{value}.ppm", "prompt": "What?" * (value + 1), "completion": " A."} for value in range(3)]
    rows.append({"images": ["2.ppm", "3.ppm"], "prompt": "Same?", "completion": " No, not the same."})
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return tmp_path


def test_batch_has_the_images_of_its_rows_and_labels_of_completions_only(records):
    data = ImageTextDataModule(path=records, validation_path=records, processor=PLAIN, batch_size=4)
    data.trainer = SimpleNamespace(distributed_sampler_kwargs=None)
    data.setup("fit")
    (batch,) = data.val_dataloader()
    image, decode = data.processor.tokenizer.convert_tokens_to_ids("<image>"), data.text_tokenizer.decode
    assert batch["pixel_values"].shape == (5, 3, 8, 8)
    wanted = torch.tensor([0, 60, 120, 120, 180]) / 127.5 - 1
    torch.testing.assert_close(batch["pixel_values"].mean((1, 2, 3)), wanted)
    assert (batch["input_ids"] == image).sum(1).tolist() == [3, 3, 3, 6]
    learned = [decode(row[row != -100]) for row in batch["labels"]]
    assert learned == [" A.<|endoftext|>"] * 3 + [" No, not the same.<|endoftext|>"]
    kept = [decode(ids[mask > 0]) for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    assert kept[1] == "<image>" * 3 + "\nWhat?What? A.<|endoftext|>"
    assert (batch["input_ids"] == batch["labels"])[batch["labels"] != -100].all()
    assert len(data.train_dataloader()) == 1


def test_prompt_with_image_tokens_says_where_they_are_and_long_completions_lose_their_end(tmp_path):
    content, collator = write_image(tmp_path / "a.ppm", 9), ImageTextCollator(PlainProcessor(**PLAIN), max_length=12)
    batch = collator([{"images": [content], "prompt": "See <image> it", "completion": " the bar of the image"}])
    assert batch["input_ids"].shape == (1, 12)
    decode = collator.processor.tokenizer.decode
    assert decode(batch["input_ids"][0]).startswith("See <image><image><image> it")
    assert decode(batch["labels"][0][batch["labels"][0] != -100])


def test_processor_with_a_chat_template_gets_a_message_and_adds_no_special_tokens(tmp_path):
    """As transformers' processors: padding on the left, and types of tokens."""
    plain, calls = PlainProcessor(**PLAIN), []

    class Processor:
        tokenizer, chat_template, image_token = plain.tokenizer, "template", "<image>"

        def apply_chat_template(self, messages, **options):
            assert options == {"add_generation_prompt": True, "tokenize": False}
            return "user: <image>" + messages[0]["content"][-1]["text"] + " assistant:"

        def __call__(self, **options):
            calls.append(options)
            encoded = plain(text=options["text"], images=options["images"])
            flipped = {key: encoded[key].flip(1) for key in ("input_ids", "attention_mask")}
            rows = [
                row[mask > 0].flip(0) for row, mask in zip(flipped["input_ids"], flipped["attention_mask"], strict=True)
            ]
            for row, ids in zip(flipped["input_ids"], rows, strict=True):
                row[-len(ids) :] = ids
            return {**encoded, **flipped, "token_type_ids": flipped["attention_mask"] * 7}

    write_image(tmp_path / "a.ppm", 9)
    examples = [{"images": [tmp_path / "a.ppm"], "prompt": each, "completion": " B."} for each in ("A?", "Longer?")]
    batch = ImageTextCollator(Processor())(examples)
    assert calls[0]["add_special_tokens"] is False
    masks = batch["attention_mask"] > 0
    texts = [plain.tokenizer.decode(ids[mask]) for ids, mask in zip(batch["input_ids"], masks, strict=True)]
    assert texts == [f"user: {'<image>' * 3}{each} assistant: B.<|endoftext|>" for each in ("A?", "Longer?")]
    learned = batch["labels"] != -100
    assert (batch["token_type_ids"] == 7 * (batch["attention_mask"] - learned.long())).all()


def test_shipped_images_can_be_read():
    files = sorted((EXAMPLES / "images").glob("*.ppm"))
    assert len(files) == 32
    assert {load_image(file).size for file in files} == {(16, 16)}
