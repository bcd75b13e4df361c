"""The drafter that training starts from: random, or the target's last layers.

Started from the target, a layer has the target's matrices and norms, and `fc` passes the deepest
tap through; head norms start at 1. Embedding and head stay the target's and are no parameters.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from dflash_jax.config import DrafterConfig
from dflash_jax.models import DFlashDrafter, Target, build_drafter
from dflash_jax.weights.match import filled, parameters


def start_drafter(config: DrafterConfig, target: Target, *, init: str, seed: int) -> DFlashDrafter:
    """A float32 drafter to train; `init` as in `TrainOptions`."""
    drafter = build_drafter(config, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    if init == "random":
        return drafter
    values: dict[Any, Any] = dict(parameters(drafter))
    given = parameters(target)
    first = target.config.num_hidden_layers - config.num_hidden_layers
    for path, value in values.items():
        source = ("layers", first + path[1], *path[2:]) if path[0] == "layers" else path
        if source in given and given[source].shape == value.shape:
            values[path] = given[source].astype(jnp.float32)
    values[("fc", "weight")] = _pass_deepest(values[("fc", "weight")], config)
    return filled(drafter, values)


def _pass_deepest(weight, config: DrafterConfig):
    """Identity on the deepest tap, a tenth of the usual noise on the others."""
    if config.target_hidden_size != config.hidden_size:
        return weight
    identity = jnp.eye(config.hidden_size, dtype=jnp.float32)
    return jnp.concatenate([0.1 * weight[: -config.hidden_size], identity])
