"""Drafters of several shapes and losses, trained on one corpus for one number of steps.

The corpus is what a `dflash-jax train` command left in its work folder. Figures are teacher-forced
on held-out documents: at equal length, far from the end of a long run, they rank what is clearly
better and no more. Run from the repository:

    dflash-jax train demo PROMPTS OUT --mask-token-id 16 --steps 1 --held-out 0.1 --accept-every 0
    python benchmarks/training_shapes.py OUT.work --steps 300
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from dflash_jax import load_target
from dflash_jax.models import DFlashDrafter, Target
from dflash_jax.training.documents import Document
from dflash_jax.training.features import cache_features, read_features
from dflash_jax.training.feed import Feed
from dflash_jax.training.held_out import HeldOut, held_out_figures
from dflash_jax.training.options import TrainOptions, drafter_config
from dflash_jax.training.step import abstract_of, compile_measure, drafter_params
from dflash_jax.training.trainer import train
from dflash_jax.weights.hub import resolve_model

# The first one is what the others are compared with; every other changes what it names.
VARIANTS: dict[str, dict[str, Any]] = {
    "3 layers, 5 taps, block 8, D-PACE": {},
    "1 layer": {"num_layers": 1},
    "2 layers": {"num_layers": 2},
    "5 layers, MLP 576": {"num_layers": 5, "intermediate_size": 576},
    "1 tap": {"num_taps": 1},
    "3 taps": {"num_taps": 3},
    "block 6": {"block_size": 6},
    "block 12": {"block_size": 12},
    "decayed cross-entropy": {"loss": "decayed"},
    "distillation": {"loss": "distill"},
    "distillation, D-PACE": {"loss": "distill_dpace", "distill_weight": 0.7},
    "the same, half overlap": {
        "loss": "distill_dpace",
        "distill_weight": 0.7,
        "overlap_weight": 0.5,
    },
    "2,048 ids": {"draft_vocab": 2048},
    "512 ids": {"draft_vocab": 512},
}
# The first drafter cut afterwards: what training under so many ids is compared with.
CUTS = (2048, 512)


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One variant: its figures and its size."""
    base = TrainOptions(
        mask_token_id=args.mask_token_id,
        steps=args.steps,
        documents_per_step=8,
        anchors_per_document=args.anchors,
        learning_rate=2e-3,
        loss="dpace",
        held_out=0.1,
        evaluate_every=args.steps,
        save_every=args.steps,
        accept_every=0,
        keep_final=True,
        full_head_from=1.0,
    )
    options = dataclasses.replace(base, **VARIANTS[name])
    target = load_target(resolve_model(args.target, kind="target"), dtype="float32")
    taps = drafter_config(target.config, options).target_layer_ids
    folder = args.work / "features-of" / "-".join(map(str, taps))
    cache_features(target, args.work / "corpus", folder, taps, keep_final=True)
    place = args.work / "shapes" / name.replace(" ", "-").replace(",", "")
    begun = time.perf_counter()
    documents = read_features(folder)
    trained = train(target, documents, place, options)
    seconds = time.perf_counter() - begun
    leaves = drafter_params(trained.drafter)
    found = {
        "parameters": sum(leaf.size for name, leaf in leaves.items() if name != "d2t"),
        **figures(trained.held_out),
        "seconds": seconds,
    }
    if not VARIANTS[name]:
        for size in CUTS:
            few = dataclasses.replace(options, draft_vocab=size)
            found[f"cut to {size} ids"] = figures(cut(target, documents, few, trained.drafter))
    return found


def figures(held: HeldOut | None) -> dict[str, Any]:
    """What the table has of a held-out measure."""
    assert held is not None
    return {
        "accepted": held.accepted,
        "accepted_sampled": held.accepted_sampled,
        "by_slot": held.by_slot,
        "anchors": held.anchors,
    }


def cut(
    target: Target, documents: Sequence[Document], options: TrainOptions, drafter: DFlashDrafter
) -> HeldOut | None:
    """Held-out figures of a drafter that proposes the options' draft vocabulary alone."""
    feed = Feed(target, documents, options, drafter.config.target_layer_ids)
    measure = compile_measure(abstract_of(drafter), options, feed.allowed)
    width, params = drafter.config.block_size, drafter_params(drafter)
    batches = feed.held_out(width)
    return held_out_figures(measure, params, batches, target.embedding, target.head, width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("work", type=Path, help="work folder with a corpus")
    parser.add_argument("--target", default="demo", help="folder, hub id or 'demo'")
    parser.add_argument("--mask-token-id", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--anchors", type=int, default=16, help="blocks of an answer a step")
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    args = parser.parse_args()
    found = {}
    for name in args.only:
        found[name] = run(name, args)
        print(json.dumps({name: found[name]}), file=sys.stderr, flush=True)
        jax.clear_caches()
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
