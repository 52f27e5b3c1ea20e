"""Token ids of prompts and completions: boundaries, special tokens, chat templates, masks."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lightning_liger.data.encoding import Encoder
from lightning_liger.data.records import Record
from lightning_liger.data.tokenizer import train_bpe_tokenizer

HERE = Record({}, "data.path: a.jsonl, line 3")
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = PLAIN.replace(
    "{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}",
    "{% if m.role == 'assistant' %}{%- generation -%}{{ m.content + eos_token }}{%- endgeneration -%}"
    "{% else %}{{ m.content }}{% endif %}",
)
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello there"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Goodbye"},
]


@pytest.fixture(scope="module")
def bpe():
    """Has one merge, "ab"."""
    return train_bpe_tokenizer(["ab"], 258)


@pytest.fixture
def chat(bpe):
    def build(template: str, **kwargs) -> Encoder:
        bpe.chat_template = template
        return Encoder(bpe, kwargs)

    yield build
    bpe.chat_template = None


def with_specials(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of single characters that adds special tokens: <s> at the beginning, </s> at the end."""
    vocab = {text: index for index, text in enumerate(["<s>", "</s>", "<unk>", *"abcdefgh ="])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_merged_token_at_the_boundary_belongs_to_the_completion(bpe):
    (merged,) = bpe("ab")["input_ids"]
    prompt, (first, second) = Encoder(bpe).split(HERE, "2 a", ["b", "c"])
    assert bpe.decode(prompt) == "2 "
    assert first == [merged, bpe.eos_token_id]
    assert bpe.decode(second) == "ac<|endoftext|>"
    swapped, (second, first) = Encoder(bpe).split(HERE, "2 a", ["c", "b"])
    assert (bpe.decode(swapped), bpe.decode(second), first[0]) == ("2 ", "ac<|endoftext|>", merged)
    alone, _ = Encoder(bpe).split(HERE, "2 a", ["c"])
    assert bpe.decode(alone) == "2 a"


def test_prompt_and_completion_are_the_whole_text_and_one_end(bpe):
    for prompt, completion in (("Q: 2+2? A:", " 4"), ("", "4 4"), ("ab", ""), ("a", "<|endoftext|>"), ("ü", "ß 漢")):
        ids, (rest,) = Encoder(bpe).split(HERE, prompt, [completion])
        whole = prompt + completion.removesuffix("<|endoftext|>")
        assert bpe.decode(ids + rest) == f"{whole}<|endoftext|>"
        assert (ids + rest).count(bpe.eos_token_id) == 1


@pytest.mark.parametrize("template", ["<s> $A", "<s> $A </s>", "$A </s>", "$A"])
def test_special_tokens_stand_once_at_the_beginning_and_the_end(template):
    tokenizer = with_specials(template)
    begin = [0] * template.startswith("<s>")
    a, b, c = tokenizer.convert_tokens_to_ids(["a", "b", "c"])
    assert Encoder(tokenizer).split(HERE, "ab", ["c", "a"]) == ([*begin, a, b], [[c, 1], [a, 1]])
    assert Encoder(tokenizer).split(HERE, "<s>ab", ["c"]) == ([0, a, b], [[c, 1]])


def test_prompt_that_ends_with_the_assistant_goes_on(chat, bpe):
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    half = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "He"}]
    prompt, (completion,) = chat(template).split(HERE, half, [[{"role": "assistant", "content": "llo"}]])
    assert bpe.decode(prompt) == "[Hi][He"
    assert bpe.decode(completion) == "][llo]"


def test_tools_and_variables_reach_the_template(chat, bpe):
    template = "{{ mood }}{{ style }}{% for tool in tools or [] %}{{ tool.name }}{% endfor %}{{ messages[0].content }}"
    encoder = chat(template, mood="calm", style="short")
    record = Record({"tools": [{"name": "clock"}], "chat_template_kwargs": {"mood": "glad"}}, "here")
    assert encoder.render(record, TALK) == "gladshortclockBe kind."
    assert encoder.render(HERE, TALK) == "calmshortBe kind."


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_masks_are_those_of_the_assistant(chat, bpe, template):
    def learned(train_on: str) -> str:
        ids, mask = chat(template).conversation(HERE, TALK, train_on)
        assert len(ids) == len(mask)
        assert bpe.decode(ids).startswith("<system>Be kind.\n<user>Hi\n<assistant>Hello there<|endoftext|>\n<user>")
        return bpe.decode([token for token, value in zip(ids, mask, strict=True) if value])

    # A template without marks does not say which part of what it renders for a message ends it.
    end = "\n" if template == PLAIN else ""
    assert learned("assistant") == f"Hello there<|endoftext|>{end}Goodbye<|endoftext|>{end}"
    assert learned("last") == f"Goodbye<|endoftext|>{end}"
    assert learned("all").startswith("<system>Be kind.")
    ids, mask = chat(PLAIN).conversation(HERE, TALK[2:4], "assistant")  # which begins the conversation
    assert bpe.decode([ids[place] for place in range(sum(mask))]) == "<assistant>Hello there<|endoftext|>\n"


def test_messages_that_change_when_others_follow_are_an_error(chat, bpe):
    thinks = "{% if loop.last and m.role == 'assistant' %}<think>{% endif %}"
    template = f"{{% for m in messages %}}{thinks}{{{{ m.content }}}} {{% endfor %}}"
    with pytest.raises(ValueError, match=r"line 3: the chat template renders message 2 differently"):
        chat(template).conversation(HERE, TALK, "assistant")
    ids, mask = chat(template).conversation(HERE, TALK, "last")
    assert bpe.decode([token for token, value in zip(ids, mask, strict=True) if value]) == "<think>Goodbye "


def test_failures_of_templates_name_the_record(chat, bpe):
    for template, problem in (
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "the chat template failed"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    ):
        with pytest.raises(ValueError, match="a.jsonl, line 3: .*" + problem):
            chat(template).conversation(HERE, TALK, "assistant")
    empty = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="line 3: the chat template marks no token"):
        chat(empty).conversation(HERE, TALK[:3], "assistant")
