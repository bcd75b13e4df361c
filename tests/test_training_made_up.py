"""Tests of `training/made_up.py`: prompts that the target writes, dropped, kept and resumed."""

import math

import pytest

from dflash_jax.errors import ConfigError
from dflash_jax.training.made_up import PromptOptions, before_user_text, make_up_prompts
from tiny_chat import Words


class Writer:
    """Continues its i-th prompt with the i-th of some texts; notes what it was asked."""

    def __init__(self, *texts: str):
        self.tokenizer, self.texts = Words(), texts
        self.asked: list[tuple[str, int]] = []

    def answers(self, prompts, *, max_tokens, temperatures, seeds):
        begin = len(self.asked)
        self.asked += [
            (self.tokenizer.decode(ids), seed) for ids, seed in zip(prompts, seeds, strict=True)
        ]
        texts = self.texts[begin : begin + len(prompts)]
        return [
            (self.tokenizer.encode(text), "stop" if text.endswith("</s>") else "length")
            for text in texts
        ]

    def close(self):
        pass


def test_what_the_target_wrote_goes_through_the_chat_template(tmp_path):
    writer = Writer("what is it </s>", "a b c d", "of two </s>", "x </s>")
    options = PromptOptions(made_up=4, seeds=("", "Write one"), min_tokens=2)
    made = make_up_prompts(writer, options, 64, tmp_path)
    assert [text for text, _ in writer.asked] == ["<u>", "<u> Write one"] * 2
    assert len({seed for _, seed in writer.asked}) == 4
    assert [p.messages[0]["content"] for p in made] == ["what is it", "of two"]
    assert [writer.tokenizer.decode(p.ids) for p in made] == [
        "<u> what is it <a>",
        "<u> of two <a>",
    ]


def test_a_begun_turn_keeps_its_beginning(tmp_path):
    writer = Writer("a poem </s>")
    options = PromptOptions(made_up=1, seeds=("Write me",), min_tokens=2)
    (made,) = make_up_prompts(writer, options, 64, tmp_path)
    assert made.messages[0]["content"] == "Write me a poem"


def test_made_up_prompts_are_made_once_and_go_on_after_the_last_whole_shard(tmp_path):
    texts = [f"prompt number {i} </s>" for i in range(5)]
    options = PromptOptions(made_up=5, min_tokens=2, shard_size=2)
    whole = make_up_prompts(first := Writer(*texts), options, 64, tmp_path / "a")
    (tmp_path / "a" / "prompts-00001.jsonl").unlink()
    again = Writer(*texts[2:4])
    again.tokenizer = first.tokenizer
    assert make_up_prompts(again, options, 64, tmp_path / "a") == whole
    assert again.asked == first.asked[2:4]  # with the seeds that they had
    with pytest.raises(ConfigError, match=r"max_tokens was 64 and is 32"):
        make_up_prompts(again, options, 32, tmp_path / "a")


def test_a_template_that_drops_the_users_text_is_refused():
    class Deaf(Words):
        def chat_ids(self, messages, *, add_generation_prompt=True):
            return self.encode("<u> <a>")

    assert before_user_text(Words()) == "<u> "
    with pytest.raises(ConfigError, match="drops the user's text"):
        before_user_text(Deaf())


def test_prompt_options_that_ask_for_nothing_possible_are_refused():
    with pytest.raises(ConfigError, match="made_up -1: at least 0; shard_size 0: at least 1"):
        PromptOptions(made_up=-1, shard_size=0)
    with pytest.raises(ConfigError, match="seeds is empty"):
        PromptOptions(made_up=1, seeds=())
    for value in (math.nan, math.inf):
        with pytest.raises(ConfigError, match=f"temperature {value}: "):
            PromptOptions(made_up=1, temperature=value)
