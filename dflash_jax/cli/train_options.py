"""The options of `dflash-jax train` as the command line reads them.

None is an option that was not given. What they mean is `TrainOptions`; how they become that record
is `train_job.py`.
"""

import enum
from pathlib import Path
from typing import Annotated

import typer

from dflash_jax.cli.convert import Layout


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


class Init(enum.StrEnum):
    """As `TrainOptions.init`."""

    TARGET = "target"
    RANDOM = "random"


class Features(enum.StrEnum):
    """As `TrainOptions.features`."""

    CACHED = "cached"
    COMPUTED = "computed"


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
InitOption = Annotated[
    Init | None, typer.Option("--init", help="What the layers start from [target].")
]
FeaturesOption = Annotated[
    Features | None,
    typer.Option("--features", help="Kept on disk, or computed anew every step [cached]."),
]
KeepFinal = Annotated[
    bool | None,
    typer.Option("--keep-final", help="Keep what distilling losses need, whatever the loss."),
]
Pack = Annotated[
    int | None, typer.Option("--pack", help="Answers that share a row, for less padding [1].")
]
AnchorChunk = Annotated[
    int | None,
    typer.Option("--anchor-chunk", help="Blocks of a row computed at a time; 0: all [0]."),
]
SlidingWindow = Annotated[
    int | None,
    typer.Option("--sliding-window", help="Positions back that the drafter sees; default: all."),
]
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
WeightDecay = Annotated[float | None, typer.Option("--weight-decay", help="Of the optimiser [0].")]
Clip = Annotated[
    float | None, typer.Option("--clip", help="Largest norm of a step's gradient [1].")
]
Gamma = Annotated[
    float | None, typer.Option("--gamma", help="Slots over which weights decay, loss decayed [4].")
]
NarrowUntil = Annotated[
    float | None,
    typer.Option("--narrow-until", help="Share of the steps with narrow blocks first [0]."),
]
NarrowWidth = Annotated[
    int | None, typer.Option("--narrow-width", help="Slots of those narrow blocks [4].")
]
Frequent = Annotated[
    int | None,
    typer.Option("--frequent", help="Frequent ids in every step's softmax; 0: all ids [6144]."),
]
Extra = Annotated[
    int | None, typer.Option("--extra", help="Other ids in it, sampled anew each step [2048].")
]
FullHeadFrom = Annotated[
    float | None,
    typer.Option("--full-head-from", help="Share of the steps after which all ids are in [0.9]."),
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
OverlapWeight = Annotated[
    float | None,
    typer.Option(
        "--overlap-weight",
        help="Share of -log(overlap) in it, for drafts at temperature 1; 0 to 1 [0].",
    ),
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
LayoutOption = Annotated[
    Layout, typer.Option("--layout", help="Of the drafter's folder, as other engines read it.")
]
DraftVocab = Annotated[
    int | None,
    typer.Option("--draft-vocab", help="Train for the answers' so many most frequent ids alone."),
]
