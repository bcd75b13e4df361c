"""The rule that turns gradients into updates: clipping, AdamW or Muon, and the rate over the steps.

Everything it keeps is float32 and for the drafter alone. The step that calls it is `step.py`.
"""

import optax

from dflash_jax.training.options import TrainOptions


def make_optimizer(options: TrainOptions) -> optax.GradientTransformation:
    """Clipping, then AdamW, or Muon for matrices with AdamW for the rest, at `learning_rate`."""
    rate, decay = learning_rate(options), options.weight_decay
    if options.optimizer == "adamw":
        rule = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=decay)
    else:
        rule = optax.contrib.muon(
            rate,
            weight_decay=decay,
            adam_b2=0.95,
            adam_weight_decay=decay,
            # Updates of the size that AdamW's have (Liu et al. 2025, 2502.16982), so that both
            # rules take the same rate.
            consistent_rms=0.2,
        )
    return optax.chain(optax.clip_by_global_norm(options.clip), rule)


def learning_rate(options: TrainOptions) -> optax.Schedule:
    """The rate at a step: a linear warm-up to the peak, then the schedule's way to 0.

    "wsd" (warm-up, stable, decay: Hu et al. 2024, 2404.06395, here with a linear decay) leaves the
    number of steps open until the decay begins.
    """
    peak, warmup, steps = options.learning_rate, options.warmup_steps, options.steps
    if options.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(steps, warmup + 1))
    decay = options.decay_steps
    parts = [
        optax.linear_schedule(0.0, peak, warmup),
        optax.constant_schedule(peak),
        optax.linear_schedule(peak, 0.0, decay),
    ]
    return optax.join_schedules(parts, [warmup, steps - decay])
