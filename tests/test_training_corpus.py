"""Tests of `training/corpus.py`: loops, filters, conversations, and what a resume does."""

import dataclasses
import json
import math

import pytest

from dflash_jax.errors import ConfigError, RequestError
from dflash_jax.training import corpus
from dflash_jax.training.corpus import CorpusOptions, loop_start
from dflash_jax.training.prompts import Prompt, next_turn, prompts_from_file
from tiny_chat import Words


def _prompts(count):
    return [Prompt([1, 2, i + 3], "test") for i in range(count)]


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
    with pytest.raises(ConfigError, match=r"\(options.min_answer_tokens was 10 and is 3\)"):
        corpus.write_corpus(tmp_path, _prompts(2), answer, CorpusOptions(min_answer_tokens=3))
    with pytest.raises(ConfigError, match="prompts was 2 and is 3"):
        corpus.write_corpus(tmp_path, _prompts(3), answer, CorpusOptions())
    with pytest.raises(ConfigError, match="target was None and is 'x'"):
        made_from = {"target": "x"}
        corpus.write_corpus(tmp_path, _prompts(2), answer, CorpusOptions(), made_from=made_from)


def test_a_folder_without_shards_is_refused(tmp_path):
    with pytest.raises(RequestError, match="no corpus"):
        corpus.shard_paths(tmp_path)


def test_every_answer_of_a_conversation_is_learned_once_and_no_prompt(tmp_path):
    words = Words()
    path = tmp_path / "prompts.jsonl"
    turns = (["one", "two", "three"], ["cut", "never"], ["looping", "never"], ["four"])
    path.write_text("".join(json.dumps({"turns": t}) + "\n" for t in turns))
    said = {"cut": ("p q r s", "length"), "looping": ("l " * 30, "stop")}
    asked: list[list[str]] = []

    def answer(group):
        texts = [words.decode(p.ids) for p in group]
        asked.append(texts)
        found = [said.get(t.split()[-2], (f"A{len(t.split())} b c </s>", "stop")) for t in texts]
        return [(words.encode(text), reason) for text, reason in found]

    counts = corpus.write_corpus(
        tmp_path / "c",
        list(prompts_from_file(path, words)),
        answer,
        CorpusOptions(min_answer_tokens=4),
        follow=lambda prompt, ids: next_turn(words, prompt, ids),
    )
    first = "<u> one <a>"
    second = f"{first} A3 b c <u> two <a>"
    third = f"{second} A9 b c <u> three <a>"
    assert asked[1:] == [[second], [third]]  # one batch a turn
    assert len(asked[0]) == 4
    lines = list(corpus.read_shard(corpus.shard_paths(tmp_path / "c")[0]))
    got = [(words.decode(a.prompt_ids), words.decode(a.answer_ids)) for a in lines]
    assert got[0] == (first, "A3 b c") and got[4:] == [(second, "A9 b c"), (third, "A15 b c")]
    assert got[2] == ("<u> looping <a>", " ".join("l" * 24))
    assert counts == {"stop": 4, "length": 1, "loop": 1, "turn after a cut answer": 2}


def test_cut_answers_can_be_left_out_and_failed_ones_always_are(tmp_path):
    made = {
        3: ([5] * 60, "stop"),
        4: (list(range(40)), "length"),
        5: ([], "abort"),
        6: (list(range(20)), "stop"),
    }
    counts = corpus.write_corpus(
        tmp_path,
        _prompts(4),
        lambda group: [made[p.ids[2]] for p in group],
        CorpusOptions(keep_cut=False),
    )
    assert counts == {"loop": 1, "length": 1, "failed": 1, "stop": 1}
    (line,) = corpus.read_shard(corpus.shard_paths(tmp_path)[0])
    assert line.prompt_ids == [1, 2, 6]
    with pytest.raises(RequestError, match=r"none of 2 prompts has an answer.*'too short': 2"):
        corpus.write_corpus(
            tmp_path / "none", _prompts(2), lambda g: [([7], "stop")] * len(g), CorpusOptions()
        )


def test_long_prompts_are_said_and_nothing_but_long_ones_is_refused(tmp_path, caplog):
    prompts = [Prompt(list(range(n)), "test") for n in (4, 9, 12)]

    def answer(group):
        return [(list(range(20)), "stop")] * len(group)

    with pytest.raises(
        RequestError, match="all 2 prompts have more than max_prompt_tokens=8 tokens, 9 at least"
    ):
        corpus.write_corpus(tmp_path, prompts[1:], answer, CorpusOptions(max_prompt_tokens=8))
    assert not list(tmp_path.iterdir())
    corpus.write_corpus(tmp_path, prompts, answer, CorpusOptions(max_prompt_tokens=8))
    assert "2 of 3 prompts have more than max_prompt_tokens=8 tokens" in caplog.text


def test_a_prompts_seed_is_its_own_wherever_it_stands():
    one, other = _prompts(2)
    seeds = {corpus.prompt_seed(p, s) for p in (one, other) for s in (0, 1)}
    assert len(seeds) == 4 and all(0 <= seed < 2**32 for seed in seeds)
    assert corpus.prompt_seed(one, 3) == corpus.prompt_seed(one._replace(source="x"), 3)


def test_a_share_of_the_prompts_is_answered_greedily_always_the_same_ones():
    some = CorpusOptions(answer_temperature=0.7, greedy_share=0.3)
    prompts = _prompts(400)
    chosen = [corpus.prompt_temperature(prompt, some) for prompt in prompts]
    assert set(chosen) == {0.0, 0.7} and 90 < chosen.count(0.0) < 150
    assert [corpus.prompt_temperature(p, some) for p in reversed(prompts)] == chosen[::-1]
    # A larger share takes more of them, and lets go of none.
    more = CorpusOptions(answer_temperature=0.7, greedy_share=0.6)
    wider = [corpus.prompt_temperature(prompt, more) for prompt in prompts]
    assert all(now == 0 for then, now in zip(chosen, wider, strict=True) if then == 0)
    for share, found in ((0.0, {0.7}), (1.0, {0.0})):
        edge = CorpusOptions(answer_temperature=0.7, greedy_share=share)
        assert {corpus.prompt_temperature(prompt, edge) for prompt in prompts} == found


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ConfigError, match="greedy_share .*between 0 and 1"):
        CorpusOptions(greedy_share=share)


NUMBERS = [
    (f.name, f.type(-1)) for f in dataclasses.fields(CorpusOptions) if f.type in (int, float)
]


@pytest.mark.parametrize(("name", "below"), NUMBERS)
def test_no_number_of_a_corpus_may_be_below_what_it_counts(name, below):
    with pytest.raises(ConfigError, match=rf"{name} {below}: (at least|must be)"):
        CorpusOptions(**{name: below})


def test_a_corpus_that_would_be_empty_is_refused_before_a_prompt_is_answered():
    with pytest.raises(ConfigError, match="shard_size 0: at least 1; min_answer_tokens 10 is abo"):
        CorpusOptions(max_answer_tokens=9, shard_size=0)
    for value in (math.nan, math.inf):
        with pytest.raises(ConfigError, match=f"answer_temperature {value}: "):
            CorpusOptions(answer_temperature=value)
