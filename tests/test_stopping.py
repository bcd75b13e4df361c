"""Where an answer ends: end ids and limits inside a block, through `LLM.generate` and by the rule.

The script target with a perfect drafter commits blocks of 8, so that every end below lies inside
one; answers without a drafter (the oracle: the script itself, cut in Python) must be the same.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import dflash_jax as dj
import tiny
import tiny_engine
from dflash_jax.errors import RequestError
from dflash_jax.serving.stopping import Ending, end_ids, find_end

B = 8
EOS = 90
# 5 → 10 → 11 → 50 → 20 → 21 → 22 is the run of fault 24, 60 → 1, 61 → EOS → 33 the end ids.
TABLE = {5: 10, 10: 11, 11: 50, 50: 20, 20: 21, 21: 22, 61: EOS, EOS: 33}


def write_drafter(folder: Path) -> Path:
    return tiny.write_drafter(
        folder,
        block_size=B,
        num_target_layers=1,
        num_hidden_layers=1,
        hidden_size=tiny.ROWS,
        dflash_config={"mask_token_id": tiny.MASK, "target_layer_ids": [0]},
    )


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dj.LLM]:
    folder = tmp_path_factory.mktemp("script")
    target = tiny.write_script_target(
        folder / "target", TABLE, num_hidden_layers=1, eos_token_id=EOS
    )
    drafter = write_drafter(folder / "drafter")
    yield tiny_engine.start(target, drafter, tiny.perfect(TABLE), max_seq_len=64, max_batch_size=2)


def answer(llm: dj.LLM, last: int, **params) -> dj.Completion:
    return llm.generate([7, last], dj.SamplingParams(**params))[0]


@pytest.mark.parametrize("index", range(2 * B))
def test_an_end_id_ends_the_answer_at_every_place_of_a_block(llm: dj.LLM, index: int):
    """Fault 23."""
    text = tiny.script(4, 2 * B, TABLE)
    assert len(set(text)) == 2 * B and EOS not in text
    done = answer(llm, 4, max_tokens=40, stop_token_ids=[text[index]])
    assert done.token_ids == text[: index + 1]
    assert done.finish_reason == "stop"
    assert 1 + sum(done.stats.acceptance_lengths) == index + 1


def test_a_round_counts_what_it_delivered_and_what_matched(llm: dj.LLM):
    """Fault 68: the whole block matches, its third token ends the answer."""
    text = tiny.script(4, B, TABLE)
    done = answer(llm, 4, max_tokens=40, stop_token_ids=[text[3]])
    assert done.stats.acceptance_lengths == [3]
    assert done.stats.accepted_drafts_per_round == [B - 1]


def test_a_stop_inside_the_budget_is_a_stop_and_one_outside_is_not(llm: dj.LLM):
    """Fault 24."""
    inside = answer(llm, 5, max_tokens=5, stop_token_ids=[50])
    assert (inside.token_ids, inside.finish_reason) == ([10, 11, 50], "stop")
    outside = answer(llm, 5, max_tokens=5, stop_token_ids=[22])
    assert (outside.token_ids, outside.finish_reason) == ([10, 11, 50, 20, 21], "length")
    exactly = answer(llm, 5, max_tokens=5, stop_token_ids=[21])
    assert (exactly.token_ids, exactly.finish_reason) == ([10, 11, 50, 20, 21], "stop")


@pytest.mark.parametrize("count", [1, 2, B - 1, B, B + 1, 2 * B])
def test_exactly_as_many_ids_as_asked_for_come_back(llm: dj.LLM, count: int):
    """Fault 25."""
    done = answer(llm, 4, max_tokens=count)
    assert done.token_ids == tiny.script(4, count, TABLE)
    assert done.finish_reason == "length"
    assert sum(done.stats.acceptance_lengths) == count - 1


@pytest.mark.parametrize("count", [0, -1, True])
def test_no_tokens_are_refused_by_name_and_number(llm: dj.LLM, count):
    """Fault 25: 0 is refused."""
    with pytest.raises(RequestError, match=f"max_tokens={count!r}"):
        answer(llm, 2, max_tokens=count)


def test_the_models_end_id_ends_a_block_unless_it_is_ignored(llm: dj.LLM):
    """Fault 30: EOS is the second id of the answer."""
    stopped = answer(llm, 20, max_tokens=10, stop_token_ids=[61])
    assert stopped.finish_reason == "length"
    done = answer(llm, 61, max_tokens=10)
    assert (done.token_ids, done.finish_reason) == ([EOS], "stop")
    text = tiny.script(61, 10, TABLE)
    ignoring = answer(llm, 61, max_tokens=10, ignore_eos=True)
    assert (ignoring.token_ids, ignoring.finish_reason) == (text, "length")
    assert EOS in text
    own = answer(llm, 61, max_tokens=10, ignore_eos=True, stop_token_ids=[text[4]])
    assert (own.token_ids, own.finish_reason) == (text[:5], "stop")


def test_rows_of_a_batch_end_each_for_its_own_reason(llm: dj.LLM):
    params = [
        dj.SamplingParams(max_tokens=9),
        dj.SamplingParams(max_tokens=20, stop_token_ids=[20]),
        dj.SamplingParams(max_tokens=20),
        dj.SamplingParams(max_tokens=3),
    ]
    done = llm.generate([[2], [5], [61], [2, 2]], params)
    assert [(d.token_ids, d.finish_reason) for d in done] == [
        (tiny.script(2, 9, TABLE), "length"),
        ([10, 11, 50, 20], "stop"),
        ([EOS], "stop"),
        (tiny.script(2, 3, TABLE), "length"),
    ]


def test_end_ids_of_all_three_files_are_united_and_the_first_to_come_ends(tmp_path: Path):
    """Fault 28: config.json 1, generation_config.json [1, 56], tokenizer 2; 56 comes, then 2."""
    table = {5: 6, 6: 56, 56: 2, 2: 9, 30: 31, 31: 2, 40: 41, 41: 1}
    target = tiny.write_script_target(
        tmp_path / "target", table, num_hidden_layers=1, eos_token_id=1
    )
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 56]}))
    vocabulary = {f"w{i}": i for i in range(tiny.VOCAB)}
    Tokenizer(WordLevel(vocabulary, unk_token="w0")).save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w2"}))
    llm = tiny_engine.start(
        target,
        write_drafter(tmp_path / "drafter"),
        tiny.perfect(table),
        max_seq_len=32,
        max_batch_size=1,
    )
    assert llm.eos_token_ids == (1, 2, 56)
    for last, ids in ((5, [6, 56]), (30, [31, 2]), (40, [41, 1])):
        assert answer(llm, last, max_tokens=12).token_ids == ids


@pytest.mark.parametrize("count", [1, 8, 64])
@pytest.mark.parametrize("length", [0, 1, 56, 57, 63, 64, 65])
def test_a_request_is_served_exactly_or_refused_with_its_numbers(llm, length: int, count: int):
    """Fault 38: the served length is 64, blocks have 8 slots."""
    params = dj.SamplingParams(max_tokens=count)
    if 0 < length and length + count <= 64:
        done = llm.generate([[2] * length], params)[0]
        assert done.token_ids == tiny.script(2, count, TABLE)
        return
    with pytest.raises(RequestError) as error:
        llm.generate([[2] * length], params)
    message = str(error.value)
    if length == 0:
        assert "empty" in message
    else:
        assert {str(length), f"max_tokens={count}", str(length + count), "64."} <= {
            word.strip(":;,") for word in message.replace("64:", "64. ").split()
        }


BAD_PROMPTS = [
    [],
    [tiny.VOCAB],
    [-1],
    [True],
    [2] * 65,
    "text without a tokenizer",
]


@pytest.mark.parametrize("bad", BAD_PROMPTS, ids=repr)
def test_within_a_batch_only_the_bad_prompt_is_refused(llm: dj.LLM, bad):
    params = dj.SamplingParams(max_tokens=4)
    first, refused, last = llm.generate([[2], bad, [5]], params)
    assert first.token_ids == tiny.script(2, 4, TABLE)
    assert last.token_ids == tiny.script(5, 4, TABLE)
    assert refused.finish_reason == "abort"
    assert refused.error and refused.token_ids == []
    with pytest.raises(RequestError):
        llm.generate([bad], params)


@pytest.mark.parametrize("ids", [3, ["a"], [1.5], "abc", [None], [True], [-1]], ids=repr)
def test_stop_token_ids_that_are_no_ids_are_refused_within_a_batch(llm: dj.LLM, ids):
    bad = dj.SamplingParams(max_tokens=4)
    # Past the type checker of the test run, which users do not have.
    object.__setattr__(bad, "stop_token_ids", ids)
    good = dj.SamplingParams(max_tokens=4)
    done = llm.generate([[2], [5], [2]], [good, bad, good])
    assert [d.finish_reason for d in done] == ["length", "abort", "length"]
    assert done[1].error is not None and "stop_token_ids" in done[1].error


def test_nothing_to_do_is_an_empty_list(llm: dj.LLM):
    assert llm.generate([]) == []


def test_find_end_keeps_the_end_id_and_knows_which_end_came_first():
    """Fault 24, as the rule alone: run [10, 11, 50, 20, 21, 22]."""
    run = [10, 11, 50, 20, 21, 22]
    assert find_end(run, 0, 5, {50}) == Ending(3, "stop")
    assert find_end(run, 0, 3, {50}) == Ending(3, "stop")
    assert find_end(run, 0, 2, {50}) == Ending(2, "length")
    assert find_end(run, 0, 5, {22}) == Ending(5, "length")
    assert find_end(run, 0, 7, {99}) == Ending(6, None)
    assert find_end(run, 0, 6, {99}) == Ending(6, "length")
    assert find_end(run, 4, 5, {50}) == Ending(1, "length")
    assert find_end(run, 4, 8, {50, 20}) == Ending(3, "stop")


def test_find_end_passes_over_end_ids_among_the_first_min_tokens():
    run = [50, 11, 50, 50]
    assert find_end(run, 0, 9, {50}, 0) == Ending(1, "stop")
    assert find_end(run, 0, 9, {50}, 1) == Ending(3, "stop")
    assert find_end(run, 2, 9, {50}, 3) == Ending(3, "stop")
    assert find_end(run, 0, 9, {50}, 4) == Ending(4, None)
    assert find_end(run, 0, 4, {50}, 4) == Ending(4, "length")


def test_a_request_ends_at_its_own_ids_and_the_models_unless_it_ignores_these():
    assert end_ids(dj.SamplingParams(), (1, 2)) == {1, 2}
    assert end_ids(dj.SamplingParams(stop_token_ids=[3]), (1, 2)) == {1, 2, 3}
    assert end_ids(dj.SamplingParams(stop_token_ids=[3], ignore_eos=True), (1, 2)) == {3}


@given(
    blocks=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), min_size=1, max_size=6),
    limit=st.integers(1, 20),
    ends=st.sets(st.integers(0, 6), max_size=3),
    least=st.integers(0, 5),
)
def test_block_by_block_ends_where_token_by_token_ends(
    blocks, limit: int, ends: set[int], least: int
):
    naive, reason = [], None
    for token in [token for block in blocks for token in block]:
        naive.append(token)
        stops = token in ends and len(naive) > least
        reason = "stop" if stops else "length" if len(naive) == limit else None
        if reason is not None:
            break
    kept, found = [], None
    for block in blocks:
        ending = find_end(block, len(kept), limit, ends, least)
        kept += block[: ending.kept]
        found = ending.reason
        if found is not None:
            break
    assert (kept, found) == (naive, reason)
