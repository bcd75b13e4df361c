"""What a checkpoint's `config.json` and a user's options say, parsed into frozen records.

`TargetConfig` and `DrafterConfig` read every published layout that this project supports and refuse
the rest by name; no architecture number has a default anywhere below this folder. `ServeConfig`
holds what the user asked for (`None` = not set) and `ResolvedConfig` what the engine reads. Nothing
here touches JAX or reads weights.
"""

from dflash_jax.config.drafter import DrafterConfig, layer_ids_by_rule
from dflash_jax.config.geometry import LAYER_TYPES
from dflash_jax.config.reading import read_config
from dflash_jax.config.rope import ROPE_TYPES, RopeConfig
from dflash_jax.config.serve import DTYPES, ResolvedConfig, ServeConfig
from dflash_jax.config.speculators import Verifier, is_speculators, to_speculators
from dflash_jax.config.target import TARGET_TYPES, TargetConfig

__all__ = [
    "DTYPES",
    "LAYER_TYPES",
    "ROPE_TYPES",
    "TARGET_TYPES",
    "DrafterConfig",
    "ResolvedConfig",
    "RopeConfig",
    "ServeConfig",
    "TargetConfig",
    "Verifier",
    "is_speculators",
    "layer_ids_by_rule",
    "read_config",
    "to_speculators",
]
