"""Whether a run can be what its options say: from configs alone, before anything is loaded."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Literal

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.errors import ConfigError
from dflash_jax.planning import rules
from dflash_jax.training.options import TrainOptions, drafter_config

# The least of what counts or weighs.
_LEAST = {
    "num_layers": 1,
    "num_taps": 1,
    "intermediate_size": 1,
    "steps": 1,
    "documents_per_step": 1,
    "anchors_per_document": 1,
    "accumulate": 1,
    "pack": 1,
    "learning_rate": 0,
    "weight_decay": 0,
    "narrow_width": 2,
    "evaluate_every": 1,
    "save_every": 1,
    "patience": 0,
    "accept_every": 0,
    "accept_prompts": 1,
    "accept_tokens": 1,
    "anchor_chunk": 0,
    "frequent": 0,
    "extra": 1,
    "seed": 0,
}

_SHARES = {
    "warmup": "of the steps",
    "decay_share": "of the steps",
    "narrow_until": "of the steps",
    "full_head_from": "of the steps",
    "held_out": "of the documents",
    "distill_weight": "0 (labels only) to 1 (the target's distribution only)",
    "overlap_weight": "0 (divergence only) to 1 (overlap only)",
}


def checked_run(
    target: TargetConfig,
    options: TrainOptions,
    *,
    begin_with: DrafterConfig | None = None,
    devices: int = 1,
) -> tuple[DrafterConfig, TrainOptions]:
    """The config of the drafter that is trained, and the run with that drafter's shape.

    Args:
        begin_with: of the drafter to go on from; it holds, whatever `options` say of the shape.
        devices: of the mesh axis that documents are divided over.

    Raises:
        ConfigError: options that do not fit each other or the target, or a drafter that was made
            for another one or cannot be trained; names every number that does not fit and what
            would.
    """
    if begin_with is not None:
        options = options.with_shape_of(begin_with)
    findings = _of_the_options(options, devices)
    size = options.draft_vocab
    if size is not None and not 1 <= size <= target.vocab_size:
        findings.append(
            f"a draft vocabulary of {size} ids: the target has {target.vocab_size}, give 1 to "
            f"{target.vocab_size}"
        )
    if begin_with is not None:
        findings += rules.wrong_pair(target, begin_with)
        if begin_with.draft_vocab_size or begin_with.has_embed_tokens or begin_with.has_lm_head:
            findings.append(
                "a drafter with a reduced vocabulary or its own embedding or head is not trained: "
                "begin with the one that borrows them (weights.vocabulary.with_whole_vocabulary); "
                "the option draft_vocab reduces the vocabulary again"
            )
    if findings:
        raise ConfigError("; ".join(findings))
    return begin_with or drafter_config(target, options), options


def too_low(given: Mapping[str, Any], least: Mapping[str, int]) -> list[str]:
    """A sentence on each number of `given` that is below what it must be at least, or a NaN."""
    return [
        f"{name} {given[name]}: at least {bound}"
        for name, bound in least.items()
        if given[name] is not None and not given[name] >= bound
    ]


def _of_the_options(options: TrainOptions, devices: int) -> list[str]:
    """What is wrong with the numbers whatever the target is."""
    given = dataclasses.asdict(options)
    findings = [
        f"{name} {given[name]!r}: one of {', '.join(typing.get_args(hint))}"
        for name, hint in typing.get_type_hints(TrainOptions).items()
        if typing.get_origin(hint) is Literal and given[name] not in typing.get_args(hint)
    ]
    findings += too_low(given, _LEAST)
    findings += [
        f"{name} {given[name]}: above 0" for name in ("gamma", "clip") if not given[name] > 0
    ]
    findings += [
        f"{name} {given[name]}: a share, {what}"
        for name, what in _SHARES.items()
        if not 0 <= given[name] <= 1
    ]
    if options.patience and not options.held_out:
        findings.append(
            f"patience {options.patience} needs held-out documents, and held_out is 0: raise it, "
            "or set patience 0"
        )
    parts = max(options.accumulate, 1) * devices * max(options.pack, 1)
    if options.documents_per_step % parts:
        packed = f" x pack {options.pack}" if options.pack > 1 else ""
        findings.append(
            f"documents_per_step {options.documents_per_step} cannot be divided into accumulate "
            f"{options.accumulate} x {devices} devices{packed}: use a multiple of {parts}"
        )
    if options.schedule == "wsd" and options.warmup_steps + options.decay_steps > options.steps:
        findings.append(
            f"warmup {options.warmup} and decay_share {options.decay_share} leave no step of "
            f"{options.steps}: lower one of them"
        )
    return findings
