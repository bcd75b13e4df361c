"""Rotary position embedding in the half-split (NeoX) layout, with the published scaling rules.

Pure functions: inverse frequencies from a `RopeConfig` (host side, float64), cosines and sines of
positions, and their application. Target and drafter each bring their own `RopeConfig`.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.config import RopeConfig
from dflash_jax.errors import ConfigError


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """theta^(-2i/d) for i = 0 … d/2 - 1, scaled by the rule of `rope.kind`; float64 [d/2].

    Sources: linear, Chen et al. 2023 (2306.15595); llama3, the Llama 3.1 release; yarn, Peng et
    al. 2023 (2309.00071), eq. 19-23 with its default ramp.
    """
    base = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        return base / _number(rope, "factor")
    if rope.kind == "llama3":
        return _llama3(rope, base)
    if rope.kind == "yarn":
        return _yarn(rope, base, head_dim)
    return base


def _llama3(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    wavelengths = 2 * math.pi / base
    ratio = _number(rope, "original_max_position_embeddings") / wavelengths
    smooth = np.clip((ratio - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * base / _number(rope, "factor") + smooth * base


def _yarn(rope: RopeConfig, base: np.ndarray, head_dim: int) -> np.ndarray:
    def dimension(rotations: float) -> float:
        span = _number(rope, "original_max_position_embeddings") / (rotations * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(_number(rope, "beta_fast"))), 0)
    high = min(math.ceil(dimension(_number(rope, "beta_slow"))), head_dim - 1)
    ramp = (np.arange(head_dim // 2) - low) / max(high - low, 0.001)
    stretched = np.clip(ramp, 0.0, 1.0)
    return base / _number(rope, "factor") * stretched + base * (1 - stretched)


def amplitude(rope: RopeConfig) -> float:
    """Factor on cosines and sines: YaRN's 0.1 ln(factor) + 1 unless the config gives one."""
    if rope.kind != "yarn":
        return 1.0
    return rope.attention_factor or 0.1 * math.log(_number(rope, "factor")) + 1.0


def _number(rope: RopeConfig, name: str) -> float:
    """A number that the config parser has made sure of for this kind."""
    value = getattr(rope, name)
    if value is None:
        raise ConfigError(f"rope type {rope.kind!r} needs {name!r}")
    return float(value)


def rotations(
    rope: RopeConfig, head_dim: int, positions: Int[Array, "b t"]
) -> tuple[Float[Array, "b t d2"], Float[Array, "b t d2"]]:
    """Cosines and sines of every position and frequency, float32 [b, t, d/2]."""
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim), jnp.float32)
    angles = positions.astype(jnp.float32)[:, :, None] * frequencies[None, None, :]
    scale = amplitude(rope)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(
    x: Float[Array, "b t h d"], cos: Float[Array, "b t d2"], sin: Float[Array, "b t d2"]
) -> Float[Array, "b t h d"]:
    """Rotates the pair (x_i, x_{i + d/2}) of every head; float32 inside, dtype of x outside."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
