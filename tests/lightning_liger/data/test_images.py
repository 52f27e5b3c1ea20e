"""Images with texts: only completions are learned, and each row has its own image."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_liger.data import ImageTextCollator, ImageTextDataModule
from tests.lightning_liger.data.kinds import END, TOKENIZER, write_lines

pytest.importorskip("PIL")
PLAIN = {"tokenizer": str(TOKENIZER), "image_size": 8, "tokens_per_image": 3}


@pytest.fixture
def folder(tmp_path):
    for value in range(4):
        pixels = np.full((4, 6, 3), 60 * value, dtype=np.uint8)
        (tmp_path / f"{value}.ppm").write_bytes(b"P6\n6 4\n255\n" + pixels.tobytes())
    rows = [{"image": f"{value}.ppm", "prompt": "What?" * (value + 1), "completion": " A."} for value in range(3)]
    rows.append({"images": ["2.ppm", "3.ppm"], "prompt": "Same?", "completion": " No, not the same."})
    write_lines(tmp_path / "records.jsonl", rows)
    return tmp_path


@pytest.fixture
def data(folder):
    module = ImageTextDataModule(path=folder, validation_path=folder, processor=PLAIN, batch_size=4)
    module.trainer = SimpleNamespace(distributed_sampler_kwargs=None)
    module.setup("fit")
    return module


def test_batch_has_the_images_of_its_rows_and_labels_of_completions_only(data):
    (batch,) = data.val_dataloader()
    image, decode = data.text_tokenizer.convert_tokens_to_ids("<image>"), data.text_tokenizer.decode
    assert batch["pixel_values"].shape == (5, 3, 8, 8)
    wanted = torch.tensor([0, 60, 120, 120, 180]) / 127.5 - 1
    torch.testing.assert_close(batch["pixel_values"].mean((1, 2, 3)), wanted)
    assert (batch["input_ids"] == image).sum(1).tolist() == [3, 3, 3, 6]
    learned = [decode(row[row != -100]) for row in batch["labels"]]
    assert learned == [f" A.{END}"] * 3 + [f" No, not the same.{END}"]
    kept = [decode(ids[mask > 0]) for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    assert kept[1] == "<image>" * 3 + f"\nWhat?What? A.{END}"
    assert (batch["input_ids"] == batch["labels"])[batch["labels"] != -100].all()
    assert len(data.train_dataloader()) == 1


def test_prompt_with_image_tokens_says_where_they_are_and_long_completions_lose_their_end(data, folder):
    example = {"images": [(folder / "0.ppm").read_bytes()], "prompt": "See <image> it", "completion": " the bar of it"}
    batch = ImageTextCollator(data.processor, max_length=12)([example])
    decode = data.text_tokenizer.decode
    assert batch["input_ids"].shape == (1, 12)
    assert decode(batch["input_ids"][0]).startswith("See <image><image><image> it the")
    assert decode(batch["labels"][0][batch["labels"][0] != -100])
    with pytest.raises(ValueError, match=r"data\.max_length must be more than the \d+ tokens of a prompt, got 3"):
        ImageTextCollator(data.processor, max_length=3)([example])


def test_processor_with_a_chat_template_gets_a_message_and_adds_no_special_tokens(data, folder):
    """With padding on the left, and types of tokens."""
    calls = []

    class Processor:
        tokenizer, chat_template, image_token = data.text_tokenizer, "template", "<image>"

        def apply_chat_template(self, messages, **options):
            assert options == {"add_generation_prompt": True, "tokenize": False}
            return "user: <image>" + messages[0]["content"][-1]["text"] + " assistant:"

        def __call__(self, **options):
            calls.append(options)
            data.text_tokenizer.padding_side = "left"
            encoded = data.processor(**options)
            data.text_tokenizer.padding_side = "right"
            return {**encoded, "token_type_ids": encoded["attention_mask"] * 7}

    examples = [{"images": [folder / "0.ppm"], "prompt": each, "completion": " B."} for each in ("A?", "Longer?")]
    batch = ImageTextCollator(Processor())(examples)
    assert calls[0]["add_special_tokens"] is False
    masks = batch["attention_mask"] > 0
    texts = [data.text_tokenizer.decode(ids[mask]) for ids, mask in zip(batch["input_ids"], masks, strict=True)]
    assert texts == [f"user: {'<image>' * 3}{each} assistant: B.{END}" for each in ("A?", "Longer?")]
    learned = batch["labels"] != -100
    assert (batch["token_type_ids"] == 7 * (batch["attention_mask"] - learned.long())).all()
