"""The frozen output head in training: all rows, or a candidate set that stands for all.

The head is by far the largest product of a training step. A candidate set holds the answers' most
frequent ids always, this batch's rare labels, and a uniform sample of the other ids whose weight in
the softmax makes up for those left out. Evaluation and the end of training use every row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int


class Candidates(NamedTuple):
    """Rows of the head that a step uses.

    Attributes:
        ids: int32 [c], distinct token ids.
        offsets: float32 [c], added to the logits: log(left-out ids per sampled id), else 0.
        labels: the batch's labels as indices into `ids`; -1 outside a reduced draft vocabulary.
    """

    ids: ArrayLike
    offsets: ArrayLike
    labels: ArrayLike


def frequent_ids(counts: np.ndarray, size: int) -> np.ndarray:
    """The `size` ids that the answers use most, ties to the lowest id; int32."""
    return np.argsort(-counts, kind="stable")[:size].astype(np.int32)


def whole_vocabulary(labels: np.ndarray, allowed: np.ndarray, vocab_size: int) -> Candidates:
    """Every id of a reduced draft vocabulary."""
    ids = allowed.astype(np.int32)
    return Candidates(ids, np.zeros(len(ids), np.float32), _places(labels, ids, vocab_size))


def choose_candidates(
    labels: np.ndarray,
    frequent: np.ndarray,
    extra: int,
    vocab_size: int,
    rng: np.random.Generator,
    allowed: np.ndarray | None = None,
) -> Candidates:
    """Frequent ids, then `extra` ids: this batch's other labels and a uniform sample of the rest.

    The softmax's denominator over n unlisted ids of which r are sampled is estimated by the sampled
    ones times n / r, hence the offset log(n / r) (sampled softmax with a uniform proposal; Jean et
    al. 2015, 1412.2007). More rare labels than `extra` would fit leave no sample: the set grows
    by one more `extra`, so shapes stay few. `allowed` is a reduced draft vocabulary that has the
    frequent ids: it is sampled from, and labels outside get -1.
    """
    every = np.arange(vocab_size) if allowed is None else allowed
    rare = np.setdiff1d(np.intersect1d(labels, every), frequent)
    extra *= 1 + len(rare) // extra
    others = np.setdiff1d(every, np.union1d(frequent, rare))
    sampled = rng.choice(others, size=min(extra - len(rare), len(others)), replace=False)
    ids = np.concatenate([frequent, rare, sampled]).astype(np.int32)
    offsets = np.zeros(len(ids), np.float32)
    if len(sampled):
        offsets[len(ids) - len(sampled) :] = np.log(len(others) / len(sampled))
    return Candidates(ids, offsets, _places(labels, ids, vocab_size))


def _places(labels: np.ndarray, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Where each label is in `ids`, -1 where it is not."""
    index = np.full(vocab_size, -1, np.int32)
    index[ids] = np.arange(len(ids), dtype=np.int32)
    return index[labels]


def candidate_logits(
    hidden: Float[Array, "b m k e"],
    head: Float[Array, "r e"],
    ids: Int[Array, " c"],
    offsets: Float[Array, " c"],
) -> Float[Array, "b m k c"]:
    """Float32 logits of the candidates."""
    rows = head.at[ids].get(mode="promise_in_bounds")
    return full_logits(hidden, rows) + offsets[None, None, None, :]


def full_logits(
    hidden: Float[Array, "b m k e"], head: Float[Array, "c e"]
) -> Float[Array, "b m k c"]:
    """Float32 logits of every given row."""
    return jax.lax.dot_general(
        hidden, head, (((3,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
