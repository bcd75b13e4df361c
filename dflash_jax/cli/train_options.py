"""The options of `dflash-jax train`, and how they become the run's own record.

An option that was not given is None and leaves the record's default; a drafter to go on from has a
shape already, and an option that says otherwise is refused. What they mean is `TrainOptions`.
"""

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_jax.errors import ConfigError

if TYPE_CHECKING:
    from dflash_jax.config import DrafterConfig
    from dflash_jax.training.options import TrainOptions


class Optimizer(enum.StrEnum):
    """As `TrainOptions.optimizer`."""

    ADAMW = "adamw"
    MUON = "muon"


class Loss(enum.StrEnum):
    """As `TrainOptions.loss`."""

    DECAYED = "decayed"
    DPACE = "dpace"
    DISTILL = "distill"
    DISTILL_DPACE = "distill_dpace"


class Schedule(enum.StrEnum):
    """As `TrainOptions.schedule`."""

    COSINE = "cosine"
    WSD = "wsd"


class ComputeDtype(enum.StrEnum):
    """As `TrainOptions.compute_dtype`."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


MaskTokenId = Annotated[
    int | None,
    typer.Option("--mask-token-id", help="A reserved id that text never holds; never guessed."),
]
Layers = Annotated[int | None, typer.Option("--layers", help="Layers of the drafter [3].")]
Taps = Annotated[int | None, typer.Option("--taps", help="Target layers that it reads [5].")]
BlockSize = Annotated[
    int | None, typer.Option("--block-size", help="Slots of a block; one less is drafted [8].")
]
IntermediateSize = Annotated[
    int | None, typer.Option("--intermediate-size", help="MLP width; default: the target's.")
]
Steps = Annotated[int | None, typer.Option("--steps", help="Optimiser steps [2000].")]
Documents = Annotated[int | None, typer.Option("--documents", help="Answers of a step [8].")]
Anchors = Annotated[int | None, typer.Option("--anchors", help="Blocks of an answer a step [32].")]
Accumulate = Annotated[
    int | None,
    typer.Option("--accumulate", help="Parts that a step is computed in, for less memory [1]."),
]
LearningRate = Annotated[float | None, typer.Option("--learning-rate", help="At its peak [0.001].")]
Warmup = Annotated[
    float | None, typer.Option("--warmup", help="Share of the steps until the peak [0.04].")
]
DecayShare = Annotated[
    float | None,
    typer.Option("--decay-share", help="Last share of the steps, to 0, with --schedule wsd [0.2]."),
]
HeldOutShare = Annotated[
    float | None,
    typer.Option("--held-out", help="Share of the answers that is measured on [0.03]."),
]
EvaluateEvery = Annotated[
    int | None, typer.Option("--evaluate-every", help="Steps between held-out figures [200].")
]
SaveEvery = Annotated[
    int | None, typer.Option("--save-every", help="Steps between checkpoints [200].")
]
Patience = Annotated[
    int | None,
    typer.Option(
        "--patience", help="Stop after so many figures without a better one; 0: never [0]."
    ),
]
AcceptEvery = Annotated[
    int | None,
    typer.Option(
        "--accept-every", help="Steps between measurements by real rounds; 0: never [400]."
    ),
]
AcceptPrompts = Annotated[
    int | None, typer.Option("--accept-prompts", help="Held-out prompts that they answer [8].")
]
AcceptTokens = Annotated[
    int | None, typer.Option("--accept-tokens", help="The longest of those answers [64].")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Of everything random [0].")]
OptimizerOption = Annotated[Optimizer | None, typer.Option("--optimizer", help="[adamw]")]
LossOption = Annotated[
    Loss | None, typer.Option("--loss", help="How slots are weighted [decayed].")
]
DistillWeight = Annotated[
    float | None,
    typer.Option("--distill-weight", help="Share of the target's distribution, 0 to 1 [0.5]."),
]
ScheduleOption = Annotated[
    Schedule | None, typer.Option("--schedule", help="Of the learning rate [cosine].")
]
ComputeDtypeOption = Annotated[
    ComputeDtype | None,
    typer.Option("--compute-dtype", help="Of the passes; weights are float32 [float32]."),
]
FromOption = Annotated[
    Path | None,
    typer.Option(
        "--from", exists=True, file_okay=False, help="Go on from this drafter; its config holds."
    ),
]
DevicesOption = Annotated[
    int, typer.Option("--devices", min=1, help="Devices that answers of a step are divided over.")
]
TensorboardOption = Annotated[
    bool, typer.Option("--tensorboard", help="Write events beside log.csv.")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print memory, disk and time, and load nothing.")
]

# Options whose field has another name.
_FIELDS = {
    "layers": "num_layers",
    "taps": "num_taps",
    "documents": "documents_per_step",
    "anchors": "anchors_per_document",
}


def run_options(given: Mapping[str, Any], begin_with: "DrafterConfig | None") -> "TrainOptions":
    """The run that was asked for.

    Args:
        given: by parameter name; None was not given.
        begin_with: config of the drafter to go on from.

    Raises:
        ConfigError: no mask id, or an option that contradicts `begin_with`.
    """
    from dflash_jax.training.options import TrainOptions

    said = {
        _FIELDS.get(name, name): value.value if isinstance(value, enum.Enum) else value
        for name, value in given.items()
        if value is not None
    }
    if begin_with is None:
        if "mask_token_id" not in said:
            raise ConfigError(
                "no mask id: give --mask-token-id, a reserved id that text never holds"
            )
        return TrainOptions(**said)
    fields: dict[str, Any] = {"mask_token_id": begin_with.mask_token_id} | said
    asked = TrainOptions(**fields)
    held = asked.with_shape_of(begin_with)
    different = [
        f"{field.name} {getattr(asked, field.name)} is {getattr(held, field.name)} there"
        for field in dataclasses.fields(held)
        if field.name in said and getattr(asked, field.name) != getattr(held, field.name)
    ]
    if different:
        raise ConfigError(
            f"--from has a drafter of another shape: {'; '.join(different)}; leave these out"
        )
    return held
