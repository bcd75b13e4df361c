"""What options mean, written once more in NumPy from the formulas, one token at a time.

Float64, sorting, Python sets: nothing here is how the library does it. `Wish` is one row's options;
`options_of` turns a list of them into the library's arrays, and that is all that is shared.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from dflash_jax.decoding.options import SlotOptions, TokenCounts, init_counts, init_options


@dataclasses.dataclass(frozen=True)
class Wish:
    """Options of one row; `ends` are forbidden at positions below `min_position`."""

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    ends: Sequence[int] = ()
    min_position: int = 0


def options_of(wishes: Sequence[Wish]) -> SlotOptions:
    """One row a wish."""
    plain = init_options(len(wishes))
    ids, values, ends = (np.array(x) for x in (plain.bias_ids, plain.bias_values, plain.ban_ids))
    for row, wish in enumerate(wishes):
        ids[row, : len(wish.bias)] = list(wish.bias)
        values[row, : len(wish.bias)] = list(wish.bias.values())
        ends[row, : len(wish.ends)] = list(wish.ends)
    columns = {
        "temperatures": [wish.temperature for wish in wishes],
        "seeds": [wish.seed for wish in wishes],
        "min_positions": [wish.min_position for wish in wishes],
    }
    for name in ("top_k", "top_p", "min_p", "presence", "frequency", "repetition"):
        columns[name] = [getattr(wish, name) for wish in wishes]
    arrays = {
        name: jnp.asarray(np.array(column, getattr(plain, name).dtype))
        for name, column in columns.items()
    }
    lists = {"bias_ids": ids, "bias_values": values, "ban_ids": ends}
    return plain._replace(**arrays, **{name: jnp.asarray(x) for name, x in lists.items()})


def counts_of(
    prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], v: int
) -> TokenCounts:
    """One row a prompt and its answer so far."""
    seen, counts = (np.array(x) for x in init_counts(len(prompts), v))
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        seen[row, list(prompt)] = True
        for token in output:
            counts[row, token] += 1
    return TokenCounts(jnp.asarray(seen), jnp.asarray(counts))


def adjusted(
    logits: np.ndarray, wish: Wish, position: int, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """Logits [v] after bias, forbidden ends and penalties."""
    out = logits.astype(np.float64)
    for token, value in wish.bias.items():
        out[token] += value
    if position < wish.min_position:
        out[list(wish.ends)] = -np.inf
    for token in {*prompt, *output}:
        out[token] *= wish.repetition if out[token] <= 0 else 1 / wish.repetition
    for token in set(output):
        out[token] -= wish.frequency * list(output).count(token) + wish.presence
    return out


def probabilities(logits: np.ndarray, wish: Wish) -> np.ndarray:
    """What a sampled row draws from, given its adjusted logits [v]."""
    scaled = (logits - logits.max()) / wish.temperature
    p = np.exp(scaled) / np.exp(scaled).sum()
    p = np.where(p >= wish.min_p * p.max(), p, 0)
    order = np.argsort(-p, kind="stable")
    if wish.top_k:
        p[order[wish.top_k :]] = 0
    p /= p.sum()
    if wish.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= wish.top_p]] = 0
    return p / p.sum()
