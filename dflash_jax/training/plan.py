"""What a training run takes, from configs alone: bytes on the device and on disk, and arithmetic.

Each row has its formula. Activations are an estimate, everything else is counted; what one device
of a mesh holds. Nothing here starts a backend or reads a tensor; `planning/` does the same for
serving.
"""

import math
from typing import NamedTuple

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.models.sizes import drafter_shapes, target_shapes
from dflash_jax.training.features import feature_bytes
from dflash_jax.training.feed import HELD_OUT_QUOTA
from dflash_jax.training.options import TrainOptions

_FLOAT32 = 4
_CHECKPOINTS = 4  # the last two, the best, and one that is being written


class Amount(NamedTuple):
    """Bytes, and how they are counted."""

    nbytes: int
    formula: str


class TrainingPlan(NamedTuple):
    """A run before it begins.

    Attributes:
        memory: bytes on one device by category.
        disk: bytes on disk by category.
        flops_per_step: multiplications and additions of one step, forward and backward, on one
            device.
        feature_flops: of the target's passes over text: once, or at every step.
        steps: of the run.
    """

    memory: dict[str, Amount]
    disk: dict[str, Amount]
    flops_per_step: float
    feature_flops: float
    steps: int

    @property
    def needed(self) -> int:
        """Bytes on one device."""
        return sum(amount.nbytes for amount in self.memory.values())

    def seconds(self, flops_per_second: float) -> float:
        """Time of steps and features at a rate; making the answers is not in it."""
        return (self.steps * self.flops_per_step + self.feature_flops) / flops_per_second


def plan_training(
    target: TargetConfig,
    drafter: DrafterConfig,
    options: TrainOptions,
    *,
    documents: int,
    longest: int,
    devices: int = 1,
) -> TrainingPlan:
    """The plan of a run.

    Args:
        documents, longest: how many texts at most, and tokens of the longest.
        devices: of the mesh axis that documents are divided over.
    """
    weights = _count(drafter_shapes(drafter))
    on_device = options.documents_per_step // (devices * options.accumulate)
    rows = len(drafter.target_layer_ids) + options.keeps_final
    memory = {
        "target weights": Amount(_FLOAT32 * _count(target_shapes(target)), "parameters x 4"),
        "drafter weights": Amount(_FLOAT32 * weights, "parameters x 4"),
        "gradients": Amount(_FLOAT32 * weights, "parameters x 4"),
        "moments": Amount(_moments(drafter, options), _MOMENTS[options.optimizer]),
        "features of a batch": Amount(
            feature_bytes(on_device * options.accumulate * longest, rows, target.hidden_size),
            f"{on_device * options.accumulate} documents x {longest:,} x {rows} taps x "
            f"{target.hidden_size} x 2",
        ),
        "activations (estimate)": _activations(drafter, options, on_device, longest),
    }
    cached = options.features == "cached"
    texts = documents if cached else options.steps * options.documents_per_step
    disk = {
        "features": Amount(
            feature_bytes(texts * longest * cached, rows, target.hidden_size),
            f"{documents:,} texts x {longest:,} x {rows} taps x {target.hidden_size} x 2, at most"
            if cached
            else "computed at every step",
        ),
        "checkpoints": Amount(
            _CHECKPOINTS * (_FLOAT32 * weights + memory["moments"].nbytes),
            f"{_CHECKPOINTS} x (drafter weights + moments)",
        ),
    }
    step = options.accumulate * _flops(drafter, options, on_device, longest)
    feature_flops = 2.0 * _count(target_shapes(target)) * texts * longest
    return TrainingPlan(memory, disk, step, feature_flops, options.steps)


_MOMENTS = {"adamw": "parameters x 2 x 4", "muon": "(matrices + 2 x the rest) x 4"}


def _count(shapes: dict) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _moments(drafter: DrafterConfig, options: TrainOptions) -> int:
    """AdamW keeps two moments of every parameter, Muon one of a matrix."""
    shapes = drafter_shapes(drafter).values()
    kept = [1 if options.optimizer == "muon" and len(shape) == 2 else 2 for shape in shapes]
    return _FLOAT32 * sum(n * math.prod(s) for n, s in zip(kept, shapes, strict=True))


def _every_row(drafter: DrafterConfig, options: TrainOptions) -> int:
    """Rows of the head for what the drafter can propose."""
    return options.draft_vocab or drafter.vocab_size


def _sampled_rows(drafter: DrafterConfig, options: TrainOptions) -> int:
    return min(options.frequent + options.extra, _every_row(drafter, options))


def _head_rows(drafter: DrafterConfig, options: TrainOptions) -> int:
    """Rows of the head in the widest step: all of them at the end of a run."""
    if options.full_head_from < 1 or not options.frequent:
        return _every_row(drafter, options)
    return _sampled_rows(drafter, options)


def _slots(options: TrainOptions, documents: int) -> int:
    return documents * options.anchors_per_document * options.block_size


def _at_a_time(options: TrainOptions) -> int:
    """Slots of a row that attention sees at a time."""
    blocks = options.pack * options.anchors_per_document
    return min(options.anchor_chunk or blocks, blocks) * options.block_size


def _recomputes(options: TrainOptions) -> bool:
    """Whether blocks come in chunks, whose forward pass is done once more in the backward one."""
    return 0 < options.anchor_chunk < options.pack * options.anchors_per_document


def _activations(
    drafter: DrafterConfig, options: TrainOptions, documents: int, longest: int
) -> Amount:
    """What a part of a step keeps for its backward pass, or the held-out measure if that is more.

    Logits and their gradient in float32; in each layer the scores, twice, and about eight rows of
    model width and three of the MLP's a slot, context rows' keys and values. With chunks only one
    keeps its layers, and of the others one row a slot is there.
    """
    size = 2 if options.compute_dtype == "bfloat16" else _FLOAT32
    slots, context = _slots(options, documents), documents * longest
    logits = 2 * _FLOAT32 * slots * _head_rows(drafter, options)
    kept = documents // options.pack * _at_a_time(options)
    keys = options.pack * longest + _at_a_time(options)
    scores = 2 * _FLOAT32 * kept * keys * drafter.num_attention_heads
    rows = kept * (8 * drafter.hidden_size + 3 * drafter.intermediate_size)
    kv = 2 * context * drafter.num_key_value_heads * drafter.head_dim
    layers = drafter.num_hidden_layers * (scores + size * (rows + kv))
    whole = size * slots * drafter.hidden_size if _recomputes(options) else 0
    step = Amount(
        logits + whole + layers,
        f"{slots:,} slots x {_head_rows(drafter, options):,} logits x 2 x 4, and {kept:,} slots x "
        f"a layer's rows and scores x {drafter.num_hidden_layers}",
    )
    return max(step, _measured(drafter, options))


def _measured(drafter: DrafterConfig, options: TrainOptions) -> Amount:
    """The held-out measure, whole on every device: logits of every id, twice."""
    documents = options.documents_per_step // options.accumulate
    slots = documents * HELD_OUT_QUOTA * (options.block_size - 1) * (options.held_out > 0)
    tables = 2 * (1 + options.keeps_final)
    return Amount(
        _FLOAT32 * tables * slots * drafter.vocab_size,
        f"held-out measure: {slots:,} slots x {drafter.vocab_size:,} logits x {tables} x 4",
    )


def _flops(drafter: DrafterConfig, options: TrainOptions, documents: int, longest: int) -> float:
    """2 a multiplication of the forward pass; twice that backward, once for the frozen head."""
    slots, context = _slots(options, documents), documents * longest
    shapes = drafter_shapes(drafter)
    inputs = math.prod(shapes[("fc", "weight")])
    width, heads = drafter.hidden_size, drafter.num_attention_heads * drafter.head_dim
    kv = 2 * width * drafter.num_key_value_heads * drafter.head_dim * drafter.num_hidden_layers
    keys = options.pack * longest + _at_a_time(options)
    attention = 2 * slots * keys * heads * drafter.num_hidden_layers
    blocks = slots * (_count(shapes) - inputs) + attention
    dense = 3 * context * (inputs + kv) + (3 + _recomputes(options)) * blocks
    late = 1 - options.full_head_from if options.frequent else 1.0
    rows = late * _every_row(drafter, options) + (1 - late) * _sampled_rows(drafter, options)
    return 2.0 * (dense + 2 * slots * width * rows)
