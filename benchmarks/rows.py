"""Which rows a bucket of n reads: the leading n after one move, or n gathered ones every round.

A round of n rows reads arena rows 0 … n-1 in place; when a row in the middle ends, the last one is
moved into its place once. The other way is to leave rows where they are and gather n of them in
every round. Timed in turn: the round, what gathering would add to each round, and one move. Run
from the repository:

    python benchmarks/rows.py
"""

import argparse
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import medians, race

from dflash_jax import load_drafter, load_target
from dflash_jax.config import DrafterConfig, ServeConfig, TargetConfig
from dflash_jax.planning.resolve import on_platform, resolve
from dflash_jax.serving.engine import Engine
from dflash_jax.weights.hub import resolve_model


def start(args: argparse.Namespace) -> Engine:
    """An engine of 16 slots whose rows all hold `--filled` tokens (zeros cost the same to read)."""
    folder = resolve_model(args.target, kind="target")
    drafter = resolve_model(args.drafter, kind="drafter")
    serve = ServeConfig(max_seq_len=args.max_seq_len, max_batch_size=args.max_batch_size)
    config = resolve(serve, TargetConfig.from_folder(folder), DrafterConfig.from_folder(drafter))
    config = on_platform(config, serve, jax.default_backend())
    return Engine(config, load_target(folder), load_drafter(drafter))


def fill(engine: Engine, filled: int) -> None:
    """All rows hold so many tokens, draft, and have an answer to go on with."""
    rows, state = engine.config.max_batch_size, engine.state
    assert state.context is not None

    def full(value: int) -> jax.Array:
        # One array a field: two that share a buffer cannot both be donated.
        return jnp.full((rows,), value, jnp.int32)

    engine.state = state._replace(
        kv=state.kv._replace(lengths=full(filled)),
        context=state.context._replace(lengths=full(filled)),
        tokens=state.tokens._replace(remaining=full(10**6), drafting=jnp.ones((rows,), jnp.bool_)),
    )


def calls(engine: Engine, rows: int, filled: int) -> dict[str, Any]:
    """The round, the gather and the move of one bucket; each waits for its result."""
    piece = engine.config.read_piece or engine.config.max_seq_len
    read = -(-filled // piece) * piece

    @jax.jit
    def gathered(state, slots):
        arenas = (state.kv.layers, state.context.layers)
        return jax.tree.map(lambda a: a[:, :, :read].at[slots].get(mode="clip"), arenas)

    slots = jnp.asarray(np.arange(rows)[::-1].copy(), jnp.int32)

    def round_() -> None:
        fill(engine, filled)
        packed = engine.start_round([True] * rows, general=False, plain=False, drafts=None)
        jax.block_until_ready(packed)

    def gather() -> None:
        jax.block_until_ready(gathered(engine.state, slots))

    def move() -> None:
        engine.move(engine.config.max_batch_size - 1, 0)
        jax.block_until_ready(engine.state.kv.lengths)

    return {"round": round_, "gather": gather, "move": move}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--target", default="demo", help="folder, hub id or 'demo'")
    parser.add_argument("--drafter", default="demo", help="folder, hub id or 'demo'")
    parser.add_argument("--max-seq-len", type=int, default=1024)
    parser.add_argument("--max-batch-size", type=int, default=16)
    parser.add_argument("--filled", type=int, default=200, help="tokens that a row holds")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    engine = start(args)
    found = {}
    for rows in engine.row_sizes:
        taken = medians(race(calls(engine, rows, args.filled), args.repeats))
        found[rows] = {f"{name}_ms": 1e3 * seconds for name, seconds in taken.items()} | {
            "gathered_over_leading": 1 + taken["gather"] / taken["round"],
            "rounds_that_pay_a_move": taken["move"] / taken["gather"],
        }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
