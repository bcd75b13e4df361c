"""A reduced draft vocabulary: loaded from either layout, drafted with, never seen in the text.

What a drafter should propose is argmax over the mapped ids of the logits that the same drafter has
over the whole vocabulary; what the text should be, the NumPy oracle and the Markov table say.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import dflash_jax as dj
import few_ids
import tiny
import tiny_engine
from dflash_jax.config import DrafterConfig
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.planning.rules import wrong_pair, wrong_vocabulary
from dflash_jax.serving.batch import Batch
from dflash_jax.weights.load import check_files
from dflash_jax.weights.match import parameters
from dflash_jax.weights.vocabulary import (
    for_target,
    with_draft_vocabulary,
    with_whole_vocabulary,
)
from few_ids import EVEN
from numpy_pair import NumpyTarget

PROMPT = [5, 17, 3, 88, 41]
# p(next | id); ids 0 and 2 are all that the drafter can propose.
MARKOV = np.array(
    [
        [0.10, 0.20, 0.30, 0.40],
        [0.25, 0.25, 0.40, 0.10],
        [0.50, 0.30, 0.15, 0.05],
        [0.70, 0.10, 0.10, 0.10],
    ]
)
# Upper 1e-4 quantile of chi-square with 4 x 3 degrees of freedom; the seeds are fixed.
CHI_SQUARE_LIMIT = 39.13


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, a drafter of the whole vocabulary, and that drafter with even ids twice."""
    folder = tmp_path_factory.mktemp("few")
    whole = tiny.write_drafter(folder / "whole")
    return {
        "target": tiny.write_target(folder / "target"),
        "whole": whole,
        "zlab": few_ids.write_zlab(folder / "zlab", whole, EVEN),
        "speculators": few_ids.write_speculators(folder / "speculators", whole, EVEN),
    }


def expected_drafts(folders: dict[str, Path], layout: str, anchor: int) -> list[int]:
    """The best even id at each slot, by the drafter of the whole vocabulary and its own tables."""
    target, drafter = dj.load_target(folders["target"]), dj.load_drafter(folders["whole"])
    embed, head = target.embedding[: tiny.VOCAB], np.asarray(target.head)
    if layout == "speculators":
        own = load_file(folders[layout] / "model.safetensors")
        embed, head = jnp.asarray(own["embed_tokens.weight"]), np.zeros((tiny.VOCAB, 32))
        head[EVEN] = own["lm_head.weight"]
    features = target.forward(jnp.asarray(PROMPT), (0, 2))[1]
    block = jnp.asarray([anchor, *[tiny.MASK] * 3])
    places = len(PROMPT) + jnp.arange(4)
    hidden = drafter.forward(features, block, places, embed, target.head[: tiny.VOCAB])[0]
    scores = np.asarray(hidden, np.float64)[1:] @ head[EVEN].T
    return [EVEN[best] for best in np.argmax(scores, axis=-1)]


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_drafts_are_the_best_of_the_mapped_ids_and_the_text_is_the_targets_own(folders, layout):
    """Fault 78: even ids only, by the drafter's own head where it has one.

    d2t of even ids is 0, 1, 2, …: read as ids it would propose the odd ones below 49 too.
    """
    answer = NumpyTarget(folders["target"]).greedy(PROMPT, 16)
    sizes: dict[str, Any] = {"max_seq_len": 32, "max_batch_size": 1, "max_num_tokens": 8}
    llm = tiny_engine.start(folders["target"], folders[layout], **sizes)
    assert llm.generate([PROMPT], dj.SamplingParams(max_tokens=2))[0].token_ids == answer[:2]
    last = llm.last_round(0)
    assert last is not None and last.drafts == expected_drafts(folders, layout, answer[0])
    rows = llm.submit(PROMPT, dj.SamplingParams(max_tokens=16))
    seen = set()
    while llm.busy:
        llm.step()
        last = llm.last_round(0)
        seen |= set(last.drafts if last else ())
    assert rows[0].output.token_ids == answer
    assert seen <= set(EVEN) and any(token % 2 for token in answer)
    held = sum(np.asarray(leaf).nbytes for leaf in llm._engine._leaves[1])
    assert llm.plan.footprint.drafter_weights == held
    gathered = {"zlab": len(EVEN) * 32 * 4, "speculators": 0}[layout]
    stored = sum(t.nbytes for n, t in load_file(folders[layout] / "model.safetensors").items()
                 if n not in ("d2t", "t2d"))  # fmt: skip
    assert held == stored + gathered + 4 * len(EVEN)


@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "without a seed"])
def test_a_sampled_row_follows_the_target_over_ids_that_are_never_drafted(tmp_path, seeded: bool):
    """Invariant 1: what follows each of four ids, two of which are in the drafter's reach.

    Seeded rows accept drafts by equality, others by speculative sampling.
    """
    logits = np.full((tiny.VOCAB, tiny.VOCAB), -1e4, np.float32)
    logits[:4, :4] = np.log(MARKOV)
    logits[4:, 0] = 0.0
    target = tiny.write_script_target(tmp_path / "t", logits=logits, num_hidden_layers=1)
    shape: dict[str, Any] = {
        "num_target_layers": 1,
        "num_hidden_layers": 1,
        "hidden_size": tiny.ROWS,
        "dflash_config": {"mask_token_id": tiny.MASK, "target_layer_ids": [0]},
    }
    whole = tiny.write_drafter(tmp_path / "whole", **shape)
    drafter = few_ids.write_zlab(tmp_path / "few", whole, [0, 2], **shape)
    batch = Batch(
        tiny_engine.engine(target, drafter, row_sizes=(16,), max_seq_len=96, max_batch_size=16)
    )
    # The draws are fixed in both cases: what the row asks for decides how it is judged.
    params = [dj.SamplingParams(temperature=1.0, max_tokens=80, seed=i) for i in range(16)]
    asked = [one if seeded else dataclasses.replace(one, seed=None) for one in params]
    queued = [tiny_engine.request([2], one, seed=i) for i, one in enumerate(asked)]
    rows = tiny_engine.serve(batch, queued)
    counts = np.zeros((4, 4))
    for row in rows:
        np.add.at(counts, ([2, *row.token_ids[:-1]], row.token_ids), 1)
    expected = counts.sum(axis=1, keepdims=True) * MARKOV
    assert counts.sum() == 16 * 80 and np.all(expected > 5)
    assert np.sum((counts - expected) ** 2 / expected) < CHI_SQUARE_LIMIT
    drafted = {token for last in batch.last_rounds.values() for token in last.drafts}
    assert drafted <= {0, 2}
    # 1 - d of what can be drafted, against what two draws with one noise have in common.
    assert sum(row.stats.num_accepted_drafts for row in rows) > (380 if seeded else 410)


def test_a_gathered_head_is_the_targets_rows_and_offsets_stay_whole_numbers(folders):
    """The head in another dtype; an offset in bfloat16 would be rounded from 256 on."""
    target = dj.load_target(folders["target"], dtype="bfloat16")
    drafter = for_target(dj.load_drafter(folders["zlab"], dtype="bfloat16"), target)
    assert drafter.d2t[...].dtype == jnp.int32
    np.testing.assert_array_equal(drafter.draft_ids, EVEN)
    rows = np.asarray(target.head)[EVEN]
    np.testing.assert_array_equal(np.asarray(drafter.lm_head.weight[...]), rows)


def test_a_whole_drafter_is_left_as_it_is(folders):
    drafter = dj.load_drafter(folders["whole"])
    assert for_target(drafter, dj.load_target(folders["target"])) is drafter
    assert with_draft_vocabulary(drafter, range(tiny.VOCAB)) is drafter


def test_a_vocabulary_given_to_a_drafter_is_sorted_and_stored_as_offsets(folders):
    drafter = with_draft_vocabulary(dj.load_drafter(folders["whole"]), [8, 0, 3, 2])
    assert drafter.d2t[...].tolist() == [0, 1, 1, 5]
    np.testing.assert_array_equal(drafter.draft_ids, [0, 2, 3, 8])
    assert drafter.config.draft_vocab_size == 4


def test_a_head_of_the_drafters_own_keeps_its_rows(folders, tmp_path):
    whole = few_ids.write_speculators(tmp_path / "d", folders["whole"], range(tiny.VOCAB))
    drafter = with_draft_vocabulary(dj.load_drafter(whole), EVEN)
    head = load_file(whole / "model.safetensors")["lm_head.weight"]
    np.testing.assert_array_equal(np.asarray(drafter.lm_head.weight[...]), head[EVEN])


def test_the_whole_vocabulary_comes_back_where_the_head_is_borrowed(folders):
    few, whole = (dj.load_drafter(folders[name]) for name in ("zlab", "whole"))
    again = with_whole_vocabulary(few)
    assert again.config == whole.config
    chex.assert_trees_all_equal(parameters(again), parameters(whole))
    assert with_whole_vocabulary(whole) is whole
    with pytest.raises(ConfigError, match="own head has rows for"):
        with_whole_vocabulary(dj.load_drafter(folders["speculators"]))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "0 ids"),
        ([3, 5, 3], "id 3 2 times"),
        ([-1, 4], "from -1 to 4: the target's run from 0 to 96"),
        ([4, 97], "from 4 to 97: the target's run from 0 to 96"),
    ],
)
def test_ids_that_cannot_be_a_vocabulary_are_refused(folders, ids, message):
    with pytest.raises(ConfigError, match=message):
        with_draft_vocabulary(dj.load_drafter(folders["whole"]), ids)


def test_a_second_vocabulary_is_refused(folders):
    with pytest.raises(ConfigError, match="has a vocabulary of 49 ids already"):
        with_draft_vocabulary(dj.load_drafter(folders["zlab"]), [1, 2])


def damaged(folders: dict[str, Path], tmp_path: Path, layout: str, **tensors: np.ndarray) -> Path:
    found = load_file(folders[layout] / "model.safetensors")
    raw = json.loads((folders[layout] / "config.json").read_text())
    return tiny.write_checkpoint(tmp_path / "damaged", raw, {**found, **tensors})


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (np.array(EVEN, np.int64), "from 0 to 144: the target's run from 0 to 96"),
        (np.array([1, 0, *[0] * 47], np.int64), "id 1 2 times"),
    ],
    ids=["ids for offsets", "twice"],
)
def test_offsets_that_give_no_vocabulary_are_refused_before_a_backend_starts(
    folders, tmp_path, d2t, message
):
    """Faults 78, 82: ids in place of offsets run out of the vocabulary or repeat themselves."""
    folder = damaged(folders, tmp_path, "zlab", d2t=d2t)
    for check in (lambda: check_files(folder, "drafter"), lambda: dj.load_drafter(folder)):
        with pytest.raises(CheckpointError, match=rf"d2t holds offsets .*{message}"):
            check()


def test_flags_and_offsets_must_name_the_same_ids(folders, tmp_path):
    """Offsets 0, 0, … are the ids 0 … 48, which are ids as good as any: only t2d can tell."""
    folder = damaged(folders, tmp_path, "speculators", d2t=np.zeros(49, np.int64))
    with pytest.raises(CheckpointError, match="t2d .* flags 49 ids .* 49, of which 25 are flagged"):
        dj.load_drafter(folder)


def test_offsets_in_a_float_dtype_are_refused(folders, tmp_path):
    folder = damaged(folders, tmp_path, "zlab", d2t=np.zeros(49, np.float32))
    with pytest.raises(CheckpointError, match="d2t .*unsupported dtype F32; supported: I64, I32"):
        dj.load_drafter(folder)


def test_an_id_beyond_this_target_is_refused_though_the_drafter_has_it(folders, tmp_path):
    """Fault 77: padding of the drafter's vocabulary is no id of the target's."""
    raw = {"vocab_size": tiny.ROWS, "num_hidden_layers": 2}
    folder = few_ids.write_zlab(tmp_path / "wide", folders["whole"], [1, 2, 100], **raw)
    check_files(folder, "drafter", vocab_size=tiny.ROWS)
    with pytest.raises(CheckpointError, match="ids from 1 to 100: the target's run from 0 to 96"):
        check_files(folder, "drafter", vocab_size=tiny.VOCAB)
    with pytest.raises(CheckpointError, match="ids from 1 to 100"):
        for_target(dj.load_drafter(folder), dj.load_target(folders["target"]))


@pytest.mark.parametrize("missing", ["d2t", "lm_head.weight", "embed_tokens.weight"])
def test_what_the_config_promises_and_the_files_lack_is_named(folders, tmp_path, missing: str):
    found = load_file(folders["speculators"] / "model.safetensors")
    raw = json.loads((folders["speculators"] / "config.json").read_text())
    del found[missing]
    folder = tiny.write_checkpoint(tmp_path / "lacking", raw, found)
    with pytest.raises(CheckpointError, match=f"tensor {missing} .*is missing from"):
        check_files(folder, "drafter")


def test_a_drafter_with_both_tables_may_have_a_width_of_its_own():
    own = {**tiny.DRAFTER["dflash_config"], "has_embed_tokens": True, "has_lm_head": True}
    raw: dict[str, Any] = {**tiny.DRAFTER, "hidden_size": 48, "target_hidden_size": 32}
    target = dj.TargetConfig.from_dict(tiny.TARGET)

    def findings(dflash: dict[str, Any]) -> Sequence[str]:
        return wrong_pair(target, DrafterConfig.from_dict({**raw, "dflash_config": dflash}))

    assert findings(own) == []
    assert "hidden_size is 48" in findings({**own, "has_lm_head": False})[0]


def test_a_mask_id_needs_a_row_where_it_is_embedded():
    """Fault 77: beyond the target's rows it may be, within its own table."""
    own = {"mask_token_id": 130, "target_layer_ids": [0, 2]}
    target = dj.TargetConfig.from_dict(tiny.TARGET)

    def findings(**more: Any) -> Sequence[str]:
        raw = {**tiny.DRAFTER, "vocab_size": 140, "dflash_config": {**own, **more}}
        return wrong_vocabulary(target, DrafterConfig.from_dict(raw))

    assert "mask_token_id 130 has no row" in findings()[0]
    assert findings(has_embed_tokens=True) == []
