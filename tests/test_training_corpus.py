"""Tests of `training/corpus.py`: prompts, loops, filters, and shards that survive a kill."""

import json

import pytest

from dflash_jax.errors import ConfigError, RequestError
from dflash_jax.training import corpus
from dflash_jax.training.corpus import CorpusOptions, Prompt, loop_start


class Words:
    """A tokenizer of words; the template is `<u> TEXT <a>`."""

    def __init__(self):
        self.words: list[str] = []

    def encode(self, text, *, add_special_tokens=True):
        ids = []
        for word in text.split():
            if word not in self.words:
                self.words.append(word)
            ids.append(self.words.index(word))
        return ids

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(self.words[i] for i in ids)

    def chat_ids(self, messages, add_generation_prompt=True):
        return self.encode(f"<u> {messages[0]['content']} <a>")


def _prompts(count):
    return [Prompt([1, 2, i + 3], "test") for i in range(count)]


def test_prompts_are_first_turns_under_the_chat_template(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        json.dumps({"source": "s", "turns": ["one two", "later"]})
        + "\n\n"
        + json.dumps({"turns": ["three"]})
        + "\n"
    )
    words = Words()
    got = list(corpus.prompts_from_file(path, words))
    assert [words.decode(p.ids) for p in got] == ["<u> one two <a>", "<u> three <a>"]
    assert [p.source for p in got] == ["s", "prompts"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "has no prompt"), ("{}\n", "line 1 has no user turn"), ("[1\n", "line 1 has no user")],
)
def test_a_prompt_file_without_prompts_is_refused_by_line(tmp_path, text, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(RequestError, match=message):
        list(corpus.prompts_from_file(path, Words()))


def test_a_user_turn_is_cut_out_of_the_template_around_its_text():
    words = Words()
    before, after = corpus.user_turn(words, "Write a")
    assert words.decode(before) == "<u> Write a"
    assert words.decode(after) == "<a>"


def test_a_loop_is_found_where_its_third_period_ends():
    text = list(range(100, 120))
    assert loop_start(text + [1, 2, 3] * 10, 48, 24) == 20 + 24
    long = list(range(10))
    assert loop_start(text + long * 5, 48, 24) == 20 + 30
    assert loop_start(text + [7] * 23, 48, 24) is None
    assert loop_start(text + [7] * 24, 48, 24) == 44
    assert loop_start(text + list(range(60)) * 4, 48, 24) is None
    assert loop_start(text, 48, 24) is None and loop_start([], 48, 24) is None


def test_short_answers_are_left_out_loops_cut_and_all_are_counted(tmp_path):
    made = {
        3: ([5] * 60, "length"),
        4: ([5, 6], "stop"),
        5: (list(range(40)), "stop"),
        6: (list(range(50)), "length"),
    }
    counts = corpus.write_corpus(
        tmp_path, _prompts(4), lambda group: [made[p.ids[2]] for p in group], CorpusOptions()
    )
    assert counts == {"loop": 1, "too short": 1, "stop": 1, "length": 1}
    answers = list(corpus.read_shard(corpus.shard_paths(tmp_path)[0]))
    assert [(len(a.answer_ids), a.finish_reason) for a in answers] == [
        (24, "loop"),
        (40, "stop"),
        (50, "length"),
    ]
    assert answers[1].prompt_ids == [1, 2, 5]


def test_repeated_and_long_prompts_are_answered_never_and_counted(tmp_path):
    prompts = [*_prompts(2), *_prompts(1), Prompt(list(range(9)), "long")]
    asked = []

    def answer(group):
        asked.extend(p.ids for p in group)
        return [(list(range(20)), "stop")] * len(group)

    counts = corpus.write_corpus(tmp_path, prompts, answer, CorpusOptions(max_prompt_tokens=8))
    assert asked == [[1, 2, 3], [1, 2, 4]]
    assert counts["prompt repeated"] == 1 and counts["prompt too long"] == 1


def test_generation_goes_on_after_the_last_whole_shard(tmp_path):
    options, prompts = CorpusOptions(shard_size=2), _prompts(6)
    asked: list[int] = []

    def answer(group, die_at=None):
        if die_at is not None and group[0].ids[2] >= die_at:
            raise KeyboardInterrupt
        asked.extend(p.ids[2] for p in group)
        return [([p.ids[2]] * 5 + list(range(20)), "stop") for p in group]

    with pytest.raises(KeyboardInterrupt):
        corpus.write_corpus(tmp_path / "a", prompts, lambda g: answer(g, 7), options)
    (tmp_path / "a" / "corpus-00002.jsonl.partial").write_text("{half")
    corpus.write_corpus(tmp_path / "a", prompts, answer, options)
    assert asked == [3, 4, 5, 6, 7, 8]
    corpus.write_corpus(tmp_path / "b", prompts, answer, options)
    one, other = (corpus.shard_paths(tmp_path / name) for name in "ab")
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in other]
    assert len(one) == 3


def test_a_corpus_begun_with_other_options_or_prompts_is_refused(tmp_path):
    def answer(group):
        return [(list(range(20)), "stop")] * len(group)

    corpus.write_corpus(tmp_path, _prompts(2), answer, CorpusOptions())
    with pytest.raises(ConfigError, match="'min_answer_tokens': 10.*'min_answer_tokens': 3"):
        corpus.write_corpus(tmp_path, _prompts(2), answer, CorpusOptions(min_answer_tokens=3))
    with pytest.raises(ConfigError, match="prompts: 2 then, 3 now"):
        corpus.write_corpus(tmp_path, _prompts(3), answer, CorpusOptions())


def test_a_folder_without_shards_is_refused(tmp_path):
    with pytest.raises(RequestError, match="no corpus"):
        corpus.shard_paths(tmp_path)
