"""Flax NNX models: targets (Llama, Qwen2, Qwen3) and the DFlash drafter.

They read arrays and return arrays; they never write an arena and never load a file.
"""

from dflash_jax.models.drafter import DFlashDrafter, build_drafter
from dflash_jax.models.target import Target, build_target

__all__ = ["DFlashDrafter", "Target", "build_drafter", "build_target"]
