"""Writes the small data files of this folder: sums, words, stories, images, a tokenizer, a teacher's top-k tokens.

python examples/data/make.py
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lightning_liger.data import write_teacher_topk
from lightning_liger.data.tokenizer import train_bpe_tokenizer

FOLDER = Path(__file__).parent
WORDS = [
    *("lamp", "river", "stone", "cloud", "bread", "violin", "garden", "winter", "pencil", "harbor", "candle", "forest"),
    *("window", "copper", "meadow", "ladder", "basket", "mirror", "island", "bridge", "feather", "lantern", "thunder"),
    "orchard",
]
OPPOSITES = {
    **{"hot": "cold", "big": "small", "fast": "slow", "dark": "bright", "young": "old", "early": "late"},
    **{"wet": "dry", "heavy": "light", "rich": "poor", "soft": "hard", "near": "far", "full": "empty"},
}
ASKS = ["What is the opposite of {}?", "Which word means the contrary of {}?", "If it is not {}, what is it?"]
NAMES = ("Ada", "Ben", "Cleo", "Dario", "Emil", "Fern", "Greta", "Hugo")
COLORS = {"red": (220, 40, 40), "green": (40, 180, 70), "blue": (50, 80, 220), "yellow": (235, 210, 50)}
SHAPES = ("square", "bar", "cross", "frame")
IMAGE_SIZE = 16
NUM_IMAGES = 32
NUM_STORIES = 240
REWARDS = [1, 0, 0.5, 0]
TOP_K = 4
VOCAB_SIZE = 320
NUM_RECORDS = 48

Task = tuple[str, str, str, str]
"""A question, a right answer, a wrong one, and the word that the question is about, if there is one."""


def tasks(seed: int) -> Iterator[Task]:
    """Questions about sums and words, in turn."""
    draw = random.Random(seed)
    words = draw.sample(WORDS, NUM_RECORDS // 2)
    for index in range(NUM_RECORDS):
        first, second, kind = draw.randint(2, 60), draw.randint(2, 60), index % 4
        word = words.pop() if kind > 1 else ""
        if kind == 0:
            total = first + second
            yield f"How much is {first} plus {second}?", f"{first} plus {second} is {total}.", f"It is {total + 3}.", ""
        elif kind == 1:
            low, high = sorted((first, second + 61))
            right, wrong = f"{high} is larger than {low}.", f"{low} is the larger one."
            yield f"Which number is larger, {first} or {second + 61}?", right, wrong, ""
        elif kind == 2:
            yield f"Write the word {word} backwards.", word[::-1], word, word
        else:
            yield f"How many letters has the word {word}?", f"It has {len(word)} letters.", "I do not know.", word


def messages(*texts: str) -> list[dict[str, str]]:
    """A conversation that a user begins."""
    return [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(texts)]


def questions(seed: int) -> Iterator[dict[str, Any]]:
    """Questions with four choices, in the format of MMLU."""
    draw = random.Random(seed)
    words = {**OPPOSITES, **{value: key for key, value in OPPOSITES.items()}}
    asked = [(ask, word) for ask in ASKS for word in words]
    draw.shuffle(asked)
    for ask, word in asked:
        others = draw.sample(sorted(set(words) - {word, words[word]}), 3)
        answer = draw.randrange(4)
        choices = [*others[:answer], words[word], *others[answer:]]
        yield {"question": ask.format(word), "subject": "opposites", "choices": choices, "answer": answer}


def stories(seed: int) -> Iterator[dict[str, str]]:
    """Short texts of several sentences."""
    draw = random.Random(seed)
    for _ in range(NUM_STORIES):
        name, friend = draw.sample(NAMES, 2)
        first, second, third = draw.sample(WORDS, 3)
        yield {
            "text": f"{name} went to the {first} and found a {second}. {friend} asked {name} for the {second}. {name}"
            f" gave the {second} to {friend}, and {friend} gave {name} a {third}. So {name} came back from the {first}"
            f" with a {third}, and {friend} kept the {second}.\n"
        }


def image(shape: str, color: str, draw: random.Random) -> np.ndarray:
    """A shape on a gray background, ``[IMAGE_SIZE, IMAGE_SIZE, 3]`` in uint8."""
    pixels = np.full((IMAGE_SIZE, IMAGE_SIZE, 3), draw.randrange(100, 160), dtype=np.uint8)
    size = draw.randrange(8, 13)
    top, left = draw.randrange(IMAGE_SIZE - size + 1), draw.randrange(IMAGE_SIZE - size + 1)
    part, middle = pixels[top : top + size, left : left + size], slice(size // 3, size - size // 3)
    if shape == "cross":
        part[middle], part[:, middle] = COLORS[color], COLORS[color]
    elif shape == "bar":
        part[middle] = COLORS[color]
    else:
        hole = part[middle, middle].copy()
        part[:] = COLORS[color]
        if shape == "frame":
            part[middle, middle] = hole
    return pixels


def captioned(seed: int, folder: Path) -> Iterator[dict[str, str]]:
    """Images, as binary PPM files (a header and the bytes of the pixels), each with a question and its answer."""
    draw = random.Random(seed)
    (folder / "images").mkdir(exist_ok=True)
    kinds = [(shape, color) for shape in SHAPES for color in COLORS] * (NUM_IMAGES // 16)
    draw.shuffle(kinds)
    for index, (shape, color) in enumerate(kinds):
        name = f"{index:02}.ppm"
        content = f"P6 {IMAGE_SIZE} {IMAGE_SIZE} 255\n".encode() + image(shape, color, draw).tobytes()
        (folder / "images" / name).write_bytes(content)
        yield {"image": name, "prompt": "What is in the image?", "completion": f" A {color} {shape}."}


def records() -> dict[str, list[dict[str, Any]]]:
    """The records of each file."""
    pairs = [{"prompt": ask, "chosen": f" {right}", "rejected": f" {wrong}"} for ask, right, wrong, _ in tasks(1)]
    conversations = [
        {"prompt": messages(ask), "chosen": messages("", right)[1:], "rejected": messages("", wrong)[1:]}
        for ask, right, wrong, _ in tasks(2)
    ]
    feedback = [
        {"prompt": ask, "completion": f" {wrong if index % 3 == 2 else right}", "label": index % 3 != 2}
        for index, (ask, right, wrong, _) in enumerate(tasks(3))
    ]
    alpaca = [
        {"instruction": ask.replace(f"the word {word}", "this word") if word else ask, "input": word, "output": right}
        for ask, right, _, word in tasks(4)
    ]
    talks = []
    several = list(tasks(5))
    for (ask, right, *_), (then, answer, *_) in zip(several, several[1:] + several[:1], strict=True):
        turns = messages(ask, right) if len(talks) % 2 else messages(ask, right, then, answer)
        talks.append({"messages": turns})
    completions = [{"prompt": ask, "completion": f" {right}"} for ask, right, *_ in tasks(6)]
    rollouts = [
        {"prompt": ask, "completions": [f" {text}" for text in (right, wrong, 2 * right, "No.")], "rewards": REWARDS}
        for ask, right, wrong, _ in tasks(7)
    ]
    return {
        "preference.jsonl": pairs,
        "preference_conversations.jsonl": conversations,
        "feedback.jsonl": feedback,
        "alpaca.json": alpaca,
        "conversations.jsonl": talks,
        "completions.jsonl": completions,
        "rollouts.jsonl": rollouts,
        "multiple_choice.jsonl": list(questions(8)),
        "text.jsonl": list(stories(9)),
    }


def teacher_rows(tokenizer: Any, texts: list[str]) -> Iterator[dict[str, np.ndarray]]:
    """What a teacher that knows the last token only says about the next one."""
    rows = [np.array([*tokenizer(text)["input_ids"], tokenizer.eos_token_id]) for text in texts]
    counts = np.full((len(tokenizer), len(tokenizer)), 1e-3)
    for row in rows:
        np.add.at(counts, (row[:-1], row[1:]), 1)
    log_probs = np.log(counts / counts.sum(axis=1, keepdims=True))
    ids = np.argsort(-log_probs, axis=1, kind="stable")[:, :TOP_K]
    for row in rows:
        yield {
            "input_ids": row,
            "teacher_topk_ids": ids[row],
            "teacher_topk_log_probs": np.take_along_axis(log_probs, ids, axis=1)[row],
        }


def main(folder: Path = FOLDER) -> None:
    """Writes all files."""
    data = {**records(), "images/records.jsonl": list(captioned(10, folder))}
    for name, rows in data.items():
        lines = [json.dumps(row) for row in rows]
        text = "[\n" + ",\n".join(lines) + "\n]\n" if name.endswith(".json") else "\n".join(lines) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    texts = [row["prompt"] + row["completion"] for row in data["completions.jsonl"]]
    tokenizer = train_bpe_tokenizer(texts, VOCAB_SIZE)
    tokenizer.save_pretrained(folder / "tokenizer")
    file = folder / "teacher_topk.safetensors"
    write_teacher_topk(file, teacher_rows(tokenizer, texts), tokenizer=tokenizer, dtype="float16")


if __name__ == "__main__":
    main()
