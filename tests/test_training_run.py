"""Tests of `training/run.py`: one call from prompts to a folder that loads."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tiny
import tiny_training
from dflash_jax.errors import ConfigError
from dflash_jax.training.answering import AnswerEngine
from dflash_jax.training.corpus import CorpusOptions
from dflash_jax.training.made_up import PromptOptions
from dflash_jax.training.run import train_drafter
from dflash_jax.weights.load import load_drafter

END = 2


class Numbers:
    """A tokenizer of numbers; the template is `50 TEXT 51`."""

    eos_token_ids = (END,)
    has_chat_template = True

    def encode(self, text, *, add_special_tokens=True):
        return [53 if word == "@@@" else int(word) for word in text.split()]

    def decode(self, ids, skip_special_tokens=True):
        return " ".join("@@@" if i == 53 else str(i) for i in ids)

    def chat_ids(self, messages, add_generation_prompt=True):
        return [50, *self.encode(messages[0]["content"]), 51]


class Counting:
    """Answers with random ids, the end id last; remembers what it was asked."""

    tokenizer = Numbers()

    def __init__(self):
        self.asked: list[tuple[list[int], float]] = []
        self.closed = False

    def answers(self, prompts, *, max_tokens, temperatures, seeds):
        self.asked += [(list(i), t) for i, t in zip(prompts, temperatures, strict=True)]
        rng = np.random.default_rng(seeds)
        return [
            (rng.integers(3, 50, 12 + i % 5).tolist() + [END], "stop") for i in range(len(prompts))
        ]

    def close(self):
        self.closed = True


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"{i} 7"]}) + "\n" for i in range(3, 9)))
    return path


def _train(
    tmp_path,
    prompts,
    engine,
    *,
    out="drafter",
    work="work",
    begin_with=None,
    corpus=None,
    export=None,
    **changes,
):
    target = tmp_path / "target"
    if not target.exists():
        tiny.write_target(target)
    options = tiny_training.options(
        mask_token_id=tiny.MASK, num_taps=1, steps=3, save_every=3, evaluate_every=3, **changes
    )
    return train_drafter(
        target,
        prompts,
        tmp_path / out,
        options,
        engine=engine,
        work_folder=tmp_path / work,
        begin_with=begin_with,
        prompts=PromptOptions(made_up=4, seeds=("", "9 8")),
        corpus=corpus or CorpusOptions(shard_size=4),
        **(export or {}),
    )


def test_one_call_goes_from_prompts_to_a_drafter_that_loads(tmp_path, prompts):
    engine = Counting()
    assert isinstance(engine, AnswerEngine)
    trained = _train(tmp_path, prompts, engine)
    assert engine.closed  # its memory is free for training
    drafter = load_drafter(tmp_path / "drafter", dtype="float32")
    assert drafter.config == trained.drafter.config
    assert "Recipe" in (tmp_path / "drafter" / "README.md").read_text()
    # Six prompts of the file and four that the target made up, answered greedily.
    made_up = [ids for ids, temperature in engine.asked if temperature == 1.0]
    assert made_up == [[50], [50, 9, 8], [50], [50, 9, 8]]
    assert sum(temperature == 0.0 for _, temperature in engine.asked) == 10


def test_some_prompts_are_answered_greedily_and_some_not_and_the_card_says_so(tmp_path, prompts):
    engine = Counting()
    both = CorpusOptions(shard_size=4, answer_temperature=0.5, greedy_share=0.5)
    _train(tmp_path, prompts, engine, corpus=both)
    answered = [(tuple(ids), t) for ids, t in engine.asked if t != 1.0]
    assert {t for _, t in answered} == {0.0, 0.5}
    assert "at temperature 0.5, 50% greedy" in (tmp_path / "drafter" / "README.md").read_text()
    again = Counting()
    _train(tmp_path, prompts, again, work="w", out="o", corpus=replace(both, shard_size=3))
    assert sorted((tuple(ids), t) for ids, t in again.asked if t != 1.0) == sorted(answered)


def test_a_second_call_answers_nothing_again_and_gives_the_same_file(tmp_path, prompts):
    _train(tmp_path, prompts, Counting())
    first = (tmp_path / "drafter" / "model.safetensors").read_bytes()
    again = Counting()
    _train(tmp_path, prompts, again)
    assert again.asked == []
    assert (tmp_path / "drafter" / "model.safetensors").read_bytes() == first


def test_features_computed_for_each_step_give_the_parameters_of_cached_ones(tmp_path, prompts):
    """Bit for bit: rounding to bfloat16 hides how many documents a pass had, here.

    Both propose the most frequent ids of the answers; one folder is of the other layout.
    """
    changes = {"pack": 2, "anchor_chunk": 2, "sliding_window": 6, "loss": "distill"}
    # One shape of a step.
    changes |= {"narrow_until": 0.0, "full_head_from": 0.0, "draft_vocab": 20}
    one = _train(tmp_path, prompts, Counting(), **changes)
    export = {"layout": "speculators", "target_name": "owner/model"}
    changes["features"] = "computed"
    other = _train(tmp_path, prompts, Counting(), out="o", work="w", export=export, **changes)
    assert not (tmp_path / "w" / "features").exists()
    cached, computed = tiny_training.params(one.drafter), tiny_training.params(other.drafter)
    offsets = computed["d2t"]
    tiny_training.assert_same(cached, computed)

    counts = np.zeros(tiny.VOCAB, int)
    for shard in (tmp_path / "w" / "corpus").glob("*.jsonl"):
        for line in shard.read_text().splitlines():
            np.add.at(counts, json.loads(line)["answer_ids"], 1)
    ids = sorted(sorted(range(tiny.VOCAB), key=lambda i: (-counts[i], i))[:20])
    assert (offsets + np.arange(20)).tolist() == ids
    loaded = load_drafter(tmp_path / "o")
    assert loaded.config.has_lm_head and loaded.config.windows == (6, 6)
    card = (tmp_path / "o" / "README.md").read_text()
    assert f"20 ids, {counts[ids].sum() / counts.sum():.2%} of the answers' tokens" in card
    assert "drafter for owner/model" in card and "borrows" not in card


@pytest.mark.parametrize("size", [0, tiny.VOCAB + 1])
def test_a_draft_vocabulary_that_the_target_cannot_fill_is_refused_first(tmp_path, prompts, size):
    with pytest.raises(ConfigError, match=f"of {size} ids: .* give 1 to {tiny.VOCAB}"):
        _train(tmp_path, prompts, Counting(), draft_vocab=size)
    assert not (tmp_path / "work").exists()


def test_going_on_from_an_exported_drafter_keeps_its_config_and_what_it_does_not_train(
    tmp_path, prompts
):
    """Fault 129: at a rate of 0 the same tensors, to the byte, and the same config come out."""
    _train(tmp_path, prompts, Counting())
    first = load_drafter(tmp_path / "drafter", dtype="float32")
    _train(
        tmp_path,
        prompts,
        Counting(),
        out="second",
        work="more",
        begin_with=first,
        learning_rate=0.0,
        num_layers=1,
        block_size=8,
    )
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "second" / name).read_bytes() == (
            tmp_path / "drafter" / name
        ).read_bytes()
