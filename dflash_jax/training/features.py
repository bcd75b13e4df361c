"""The target's features of a corpus: computed once and kept on disk in bfloat16, or for each step.

One feature shard a corpus shard: `features-00000.bin` (rows, memory-mapped when read) and
`features-00000.npz` (ids, borders and what the rows were made with), which is written last, so that
an interrupted shard has no index and is made again. A row holds the tapped features and, where a
loss distils, the final hidden state behind them. Corpus shards are `corpus.py`'s.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_jax.errors import CheckpointError
from dflash_jax.models import Target
from dflash_jax.progress import Progress
from dflash_jax.training.corpus import Answer, read_shard, shard_paths
from dflash_jax.training.documents import Document
from dflash_jax.training.provenance import file_hash

log = logging.getLogger(__name__)

BFLOAT16 = np.dtype(jnp.bfloat16)
_Ids = Sequence[int] | np.ndarray
# Sequences of one pass are padded to a multiple of this, so that few shapes are compiled.
ROW_MULTIPLE = 64
# Sequences of one pass.
COMPUTED_AT_A_TIME = 16


def feature_bytes(tokens: int, taps: int, width: int) -> int:
    """Bytes on disk of that many tokens: tokens x taps x width x 2; a final state is one tap."""
    return tokens * taps * width * BFLOAT16.itemsize


def cache_features(
    target: Target,
    corpus: Path,
    folder: Path,
    layer_ids: Sequence[int],
    *,
    batch_size: int = COMPUTED_AT_A_TIME,
    keep_final: bool = False,
    progress: Progress | None = None,
) -> None:
    """Computes the shards that `folder` lacks; logs their size before it starts.

    A shard that was made from another corpus shard or with other layer ids is made again, as is one
    without the final hidden states where `keep_final` asks for them. `progress` counts tokens, as
    the stage "features".

    Raises:
        CheckpointError: the corpus has no shard, or the disk is full (nothing half-written is
            taken for whole afterwards).
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [
        path
        for path in shard_paths(corpus)
        if not _is_current(_index_path(folder, path), path, layer_ids, keep_final)
    ]
    tokens = sum(len(a.prompt_ids) + len(a.answer_ids) for p in missing for a in read_shard(p))
    width = target.config.hidden_size
    size = feature_bytes(tokens, len(layer_ids) + keep_final, width)
    run = _compiled_pass(target, tuple(layer_ids), keep_final)
    pace = _seconds_per_token(run, missing, batch_size)
    log.info(
        "features of %d tokens in %d shards: %.2f GB, about %.0f s",
        tokens,
        len(missing),
        size / 1e9,
        tokens * pace,
    )
    done = 0
    for path in missing:
        answers = list(read_shard(path))
        made_from = _made_from(path, layer_ids) | {"final": width if keep_final else 0}
        texts = [a.prompt_ids + a.answer_ids for a in answers]
        rows = _counted(_in_order(run, texts, batch_size), texts, done, tokens, progress)
        write_shard(_index_path(folder, path), answers, made_from, rows)
        done += sum(map(len, texts))


def corpus_documents(corpus: Path) -> list[Document]:
    """Every answer of a corpus without features: `compute_features` gives them those of a step.

    Raises:
        CheckpointError: the corpus has no shard.
    """
    documents = []
    for path in shard_paths(corpus):
        for answer in read_shard(path):
            ids = np.asarray(answer.prompt_ids + answer.answer_ids, np.int32)
            none = np.zeros((len(ids), 0), BFLOAT16)
            ended = answer.finish_reason == "stop"
            documents.append(Document(ids, len(answer.prompt_ids), ended, none))
    return documents


def compute_features(
    target: Target, layer_ids: Sequence[int], *, keep_final: bool, batch_size: int
) -> Callable[[Sequence[Document]], list[Document]]:
    """A function that gives documents their features: the rows that a shard would hold.

    Every step computes anew what it needs, `batch_size` documents a pass, and nothing is on disk.
    """
    run = _compiled_pass(target, tuple(layer_ids), keep_final)
    taps = len(layer_ids) * target.config.hidden_size

    def given(documents: Sequence[Document]) -> list[Document]:
        rows = _in_order(run, [d.ids for d in documents], batch_size)
        return [
            document._replace(
                features=row[: len(document.ids), :taps],
                final=row[: len(document.ids), taps:] if keep_final else None,
            )
            for document, row in zip(documents, rows, strict=True)
        ]

    return given


def read_features(folder: Path) -> list[Document]:
    """Every document of every whole shard, features memory-mapped.

    Raises:
        CheckpointError: no shard, or a `.bin` whose size is not what its index says.
    """
    indexes = sorted(folder.glob("features-*.npz"))
    if not indexes:
        raise CheckpointError(f"{folder} has no features-*.npz: cache the features first")
    return [document for index in indexes for document in _read_shard(index)]


def write_shard(
    index: Path,
    answers: Sequence[Answer],
    made_from: dict[str, Any],
    features: Iterator[np.ndarray],
) -> None:
    """Writes one shard: rows first, index last, each under its name only when whole.

    Raises:
        CheckpointError: the disk is full; what was written so far is removed.
    """
    lengths = [len(a.prompt_ids) + len(a.answer_ids) for a in answers]
    width = 0
    partial = index.with_suffix(".bin.partial")
    try:
        with partial.open("wb") as file:
            for length, rows in zip(lengths, features, strict=True):
                width = rows.shape[1]
                file.write(np.ascontiguousarray(rows[:length], BFLOAT16).view(np.uint16).data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(index.with_suffix(".bin"))
        _write_index(index, answers, lengths, made_from | {"width": width})
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(
            f"{index.with_suffix('.bin')} could not be written ({error.strerror}): free "
            f"{feature_bytes(sum(lengths), 1, width) / 1e9:.2f} GB or cache elsewhere"
        ) from error


def _write_index(
    index: Path, answers: Sequence[Answer], lengths: list[int], made_from: dict[str, Any]
) -> None:
    partial = index.with_suffix(".npz.partial")
    with partial.open("wb") as file:
        np.savez(
            file,
            ids=np.concatenate(
                [np.asarray(a.prompt_ids + a.answer_ids, np.int32) for a in answers]
            ),
            borders=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            answer_starts=np.asarray([len(a.prompt_ids) for a in answers], np.int32),
            ended=np.asarray([a.finish_reason == "stop" for a in answers], bool),
            made_from=np.asarray(json.dumps(made_from, sort_keys=True)),
        )
    partial.replace(index)


def _index_path(folder: Path, corpus_shard: Path) -> Path:
    number = corpus_shard.stem.rpartition("-")[2]
    return folder / f"features-{number}.npz"


def _made_from(corpus_shard: Path, layer_ids: Sequence[int]) -> dict[str, Any]:
    return {"corpus_sha256": file_hash(corpus_shard), "layer_ids": list(layer_ids)}


def _is_current(
    index: Path, corpus_shard: Path, layer_ids: Sequence[int], keep_final: bool
) -> bool:
    if not index.is_file():
        return False
    made_from = json.loads(str(np.load(index)["made_from"]))
    kept = made_from.get("final", 0) > 0 or not keep_final
    return kept and _made_from(corpus_shard, layer_ids).items() <= made_from.items()


def _read_shard(index: Path) -> list[Document]:
    arrays = np.load(index)
    ids, borders = arrays["ids"], arrays["borders"]
    made_from = json.loads(str(arrays["made_from"]))
    width = made_from["width"]
    taps = width - made_from.get("final", 0)
    rows = index.with_suffix(".bin")
    wanted = feature_bytes(len(ids), 1, width)
    if not rows.is_file() or rows.stat().st_size != wanted:
        size = rows.stat().st_size if rows.is_file() else 0
        raise CheckpointError(
            f"{rows} has {size} bytes, its index says {wanted}: remove both and cache again"
        )
    mapped = np.memmap(rows, np.uint16, "r", shape=(len(ids), width)).view(BFLOAT16)
    final = mapped[:, taps:] if taps < width else None
    return [
        Document(
            ids[begin:end],
            int(start),
            bool(ended),
            mapped[begin:end, :taps],
            None if final is None else final[begin:end],
        )
        for begin, end, start, ended in zip(
            borders[:-1], borders[1:], arrays["answer_starts"], arrays["ended"], strict=True
        )
    ]


def _compiled_pass(target: Target, layer_ids: tuple[int, ...], keep_final: bool):
    graph, state = nnx.split(target)

    @jax.jit
    def features(state: Any, ids: jax.Array) -> jax.Array:
        lengths = jnp.zeros((ids.shape[0],), jnp.int32)
        final, rows, _ = nnx.merge(graph, state).run(ids, lengths, None, layer_ids)
        if keep_final:
            rows = jnp.concatenate([rows, final], axis=-1)
        return rows.astype(jnp.bfloat16)

    return lambda ids: np.asarray(features(state, jnp.asarray(ids)))


def _in_order(run, sequences: Sequence[_Ids], batch_size: int) -> Iterator[np.ndarray]:
    """Features in the order of `sequences`, computed in padded batches of neighbours."""
    for begin in range(0, len(sequences), batch_size):
        group = sequences[begin : begin + batch_size]
        yield from run(_padded(group, batch_size))[: len(group)]


def _counted(
    rows: Iterator[np.ndarray],
    texts: Sequence[_Ids],
    done: int,
    total: int,
    progress: Progress | None,
) -> Iterator[np.ndarray]:
    """The rows as they are; tells after each text how many tokens have theirs."""
    for row, text in zip(rows, texts, strict=True):
        yield row
        done += len(text)
        if progress is not None:
            progress("features", done, total)


def _padded(sequences: Sequence[_Ids], batch_size: int) -> np.ndarray:
    """Ids of one pass; padding after the text changes no kept row, attention being causal."""
    rows = -(-max(map(len, sequences)) // ROW_MULTIPLE) * ROW_MULTIPLE
    ids = np.zeros((batch_size, rows), np.int32)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
    return ids


def _seconds_per_token(run, shards: Sequence[Path], batch_size: int) -> float:
    """Time of one pass (its second call, compiled by then) over the tokens that it holds."""
    answer = next((answer for path in shards for answer in read_shard(path)), None)
    if answer is None:
        return 0.0
    ids = _padded([answer.prompt_ids + answer.answer_ids], batch_size)
    run(ids)
    begun = time.perf_counter()
    run(ids)
    return (time.perf_counter() - begun) / ids.size
