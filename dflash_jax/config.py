"""What a checkpoint's `config.json` and a user's options say, parsed into frozen records.

`TargetConfig` and `DrafterConfig` read every published layout that this project supports and refuse
the rest by name; no architecture number has a default anywhere below this file. `ServeConfig` holds
what the user asked for (`None` = not set) and `ResolvedConfig` what the engine reads; deciding one
from the other is `planning/resolve.py`. Nothing here touches JAX or reads weights.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dflash_jax.errors import CheckpointError, ConfigError

TARGET_TYPES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DTYPES = ("auto", "float32", "bfloat16", "float16")
LAYER_TYPES = ("full_attention", "sliding_attention")
# Drafter features that change the arithmetic and that this build has no code for.
UNSUPPORTED_DRAFTER_KEYS = {
    "conv_kernel_size": "DFlash 2 convolutions",
    "selector_rank": "the DFlash 2 candidate selector",
    "markov_rank": "a DSpark Markov head",
    "gru_hidden_dim": "a Domino head",
    "use_swa": "symmetric sliding windows (use_swa)",
    "attention_sink_bias": "attention sinks",
    "draft_vocab_size": "a reduced draft vocabulary (d2t)",
    "final_logit_softcapping": "logit soft-capping",
    "output_multiplier": "an output multiplier",
    "input_embedding_scale": "an input embedding scale",
}


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed `config.json` of a checkpoint folder.

    Raises:
        CheckpointError: the folder or its `config.json` is missing or not a JSON object.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json: give a folder in Hugging Face layout")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds {type(raw).__name__}, not a JSON object")
    return raw


def _require(raw: Mapping[str, Any], key: str, what: str) -> Any:
    if raw.get(key) is None:
        raise ConfigError(f"the {what} config has no {key!r}: add it to config.json")
    return raw[key]


def _positive(raw: Mapping[str, Any], key: str, what: str) -> int:
    value = _require(raw, key, what)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"the {what} config has {key}={value!r}: a whole number >= 1 is needed")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(int(v) for v in value)


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base, scaling rule and its numbers (None where the rule has none)."""

    theta: float
    kind: str = "default"
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], what: str) -> "RopeConfig":
        """Reads `rope_theta` + `rope_scaling` or the newer `rope_parameters`.

        Raises:
            ConfigError: no theta in either place, an unknown rope type, or a missing number.
        """
        scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        if any(isinstance(value, Mapping) for value in scaling.values()):
            scaling = _single_rope(scaling, what)
        theta = scaling.get("rope_theta", raw.get("rope_theta"))
        if theta is None:
            raise ConfigError(
                f"the {what} config has 'rope_theta' neither at top level nor in 'rope_parameters'"
            )
        partial = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
        if partial not in (None, 1, 1.0):
            raise ConfigError(f"the {what} config has partial_rotary_factor={partial}: only 1.0")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        original = raw.get("original_max_position_embeddings")
        return cls._checked(
            float(theta), kind, {"original_max_position_embeddings": original} | scaling, what
        )

    @classmethod
    def _checked(cls, theta: float, kind: str, scaling: dict[str, Any], what: str) -> "RopeConfig":
        needs = {
            "default": (),
            "linear": ("factor",),
            "llama3": (
                "factor",
                "low_freq_factor",
                "high_freq_factor",
                "original_max_position_embeddings",
            ),
            "yarn": ("factor", "original_max_position_embeddings"),
        }
        if kind not in needs:
            raise ConfigError(
                f"the {what} config has rope type {kind!r}; supported: {', '.join(ROPE_TYPES)}"
            )
        values = {key: _require(scaling, key, f"{what} rope") for key in needs[kind]}
        if kind == "yarn":
            # The paper's betas; a checkpoint that was trained with others names them.
            values["beta_fast"] = scaling.get("beta_fast") or 32.0
            values["beta_slow"] = scaling.get("beta_slow") or 1.0
            values["attention_factor"] = scaling.get("attention_factor")
        return cls(theta=theta, kind=kind, **values)

    def to_dict(self) -> dict[str, Any]:
        """The newer `rope_parameters` form, without absent numbers."""
        values = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        return {"rope_theta": values.pop("theta"), "rope_type": values.pop("kind"), **values}


def _single_rope(per_type: Mapping[str, Any], what: str) -> dict[str, Any]:
    entries = [value for value in per_type.values() if isinstance(value, Mapping)]
    if any(dict(entry) != dict(entries[0]) for entry in entries):
        raise ConfigError(
            f"the {what} config has rope parameters that differ by layer type "
            f"({', '.join(per_type)}): one rotary configuration for all layers is supported"
        )
    return dict(entries[0])


def _windows(raw: Mapping[str, Any], num_layers: int, what: str) -> tuple[int | None, ...]:
    """One window (None = full attention) a layer; a window counts the query's own position."""
    types = raw.get("layer_types")
    enabled = raw.get("use_sliding_window", types is not None)
    if types is None:
        first = raw.get("max_window_layers", 0) if enabled else num_layers
        types = [LAYER_TYPES[index >= first] for index in range(num_layers)]
    if len(types) != num_layers:
        raise ConfigError(f"the {what} config has {len(types)} layer_types for {num_layers} layers")
    for index, kind in enumerate(types):
        if kind not in LAYER_TYPES:
            raise ConfigError(
                f"{what} layer {index} has type {kind!r}, which cannot be rolled back or is not "
                f"known; supported: {', '.join(LAYER_TYPES)}"
            )
    if not enabled or LAYER_TYPES[1] not in types:
        return (None,) * num_layers
    window = _positive(raw, "sliding_window", what)
    return tuple(window if kind == LAYER_TYPES[1] else None for kind in types)


def _heads(raw: Mapping[str, Any], what: str) -> dict[str, int]:
    hidden, heads = _positive(raw, "hidden_size", what), _positive(raw, "num_attention_heads", what)
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ConfigError(
            f"the {what} config has {heads} query heads, not a multiple of {kv_heads} KV heads"
        )
    head_dim = raw.get("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise ConfigError(
                f"the {what} config has no head_dim and hidden_size {hidden} is not a multiple of "
                f"{heads} heads: add head_dim to config.json"
            )
        head_dim = hidden // heads
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def _common(raw: Mapping[str, Any], what: str) -> dict[str, Any]:
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"the {what} config has hidden_act={raw['hidden_act']!r}: only 'silu'")
    num_layers = _positive(raw, "num_hidden_layers", what)
    return _heads(raw, what) | {
        "vocab_size": _positive(raw, "vocab_size", what),
        "intermediate_size": _positive(raw, "intermediate_size", what),
        "num_hidden_layers": num_layers,
        "rms_norm_eps": float(_require(raw, "rms_norm_eps", what)),
        "max_position_embeddings": _positive(raw, "max_position_embeddings", what),
        "rope": RopeConfig.from_dict(raw, what),
        "windows": _windows(raw, num_layers, what),
    }


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """The target's architecture, as its `config.json` gives it."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "TargetConfig":
        """Parses a Hugging Face `config.json` of a Llama, Qwen2 or Qwen3 model.

        Raises:
            ConfigError: an unknown `model_type`, layer type or rope type, or a missing number.
        """
        kind = raw.get("model_type")
        if kind not in TARGET_TYPES:
            raise ConfigError(
                f"target model_type {kind!r} is not supported; supported: {', '.join(TARGET_TYPES)}"
            )
        bias = bool(raw.get("attention_bias", False))
        return cls(
            model_type=kind,
            **_common(raw, "target"),
            # Absent means tied for none of the three in current releases.
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=True if kind == "qwen2" else bias,
            o_bias=False if kind == "qwen2" else bias,
            mlp_bias=bool(raw.get("mlp_bias", False)) if kind == "llama" else False,
            qk_norm=kind == "qwen3",
            eos_token_ids=_ids(raw.get("eos_token_id")),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> "TargetConfig":
        """Parses `config.json`; end ids are united with those of `generation_config.json`."""
        config = cls.from_dict(read_config(folder))
        generation = Path(folder) / "generation_config.json"
        if not generation.is_file():
            return config
        more = _ids(json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id"))
        united = tuple(dict.fromkeys(config.eos_token_ids + more))
        return dataclasses.replace(config, eos_token_ids=united)

    def with_rope_scaling(self, scaling: Mapping[str, Any]) -> "TargetConfig":
        """The same target under another rope scaling, positions multiplied by its factor."""
        raw = {
            "rope_scaling": {"rope_theta": self.rope.theta, **scaling},
            "original_max_position_embeddings": self.max_position_embeddings,
        }
        rope = RopeConfig.from_dict(raw, "rope_scaling override of the target")
        positions = int(self.max_position_embeddings * (rope.factor or 1.0))
        return dataclasses.replace(self, rope=rope, max_position_embeddings=positions)


def layer_ids_by_rule(depth: int, count: int) -> tuple[int, ...]:
    """Evenly spread tapped block ids, first 1 and last `depth - 3`.

    The rule of the published checkpoints: round(1 + i (depth - 4) / (count - 1)), ties to even;
    one id is `depth // 2`. A rule for *new* drafters: a checkpoint must name what it was trained
    with.
    """
    if count == 1:
        return (depth // 2,)
    return tuple(round(1 + i * (depth - 4) / (count - 1)) for i in range(count))


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter's architecture and what it was trained with.

    `block_size` counts the slots of a trained block. `predicts_from_anchor` says which convention
    holds: False: slot 0 is the given anchor and slots 1 … give drafts (block_size - 1 of them);
    True: every slot predicts the token after it (block_size drafts).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    attention_bias: bool
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    num_target_layers: int | None
    target_hidden_size: int
    predicts_from_anchor: bool

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "DrafterConfig":
        """Parses a z-lab DFlash `config.json`; `dflash_config` is read first, then the top level.

        Raises:
            ConfigError: a key that must be there is absent from both places, or a feature that
                this build does not support is asked for.
        """
        nested = raw.get("dflash_config") or {}
        both = {**raw, **{k: v for k, v in nested.items() if v is not None}}
        _refuse_unsupported(both)
        common = _common(both, "drafter")
        if both.get("target_layer_ids") is None:
            raise ConfigError(_missing_layer_ids(both, common["num_hidden_layers"]))
        causal = both.get("is_causal")
        return cls(
            **common,
            causal=tuple(bool(w) if causal is None else bool(causal) for w in common["windows"]),
            attention_bias=bool(both.get("attention_bias", False)),
            block_size=_positive(both, "block_size", "drafter"),
            target_layer_ids=_layer_ids(both),
            mask_token_id=_mask_id(both, common["vocab_size"]),
            num_target_layers=both.get("num_target_layers"),
            target_hidden_size=both.get("target_hidden_size") or common["hidden_size"],
            predicts_from_anchor=bool(both.get("sample_from_anchor", both.get("shift_label"))),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> "DrafterConfig":
        """Parses the `config.json` of a drafter's folder."""
        return cls.from_dict(read_config(folder))

    @property
    def trained_draft_len(self) -> int:
        """Draft tokens of a trained block: block_size - 1, or all when the anchor slot predicts."""
        return self.block_size if self.predicts_from_anchor else self.block_size - 1

    def block_width(self, max_draft_len: int) -> int:
        """Slots W of a block that gives K = `max_draft_len` drafts: K + 1, or K (see class)."""
        return max_draft_len if self.predicts_from_anchor else max_draft_len + 1

    def to_dict(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """The published z-lab layout (`model_type` names the drafter's own block type)."""
        window = next((w for w in self.windows if w), None)
        rope = self.rope.to_dict()
        scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
        extra = {"sample_from_anchor": True} if self.predicts_from_anchor else {}
        extra |= (
            {} if self.causal == tuple(map(bool, self.windows)) else {"is_causal": self.causal[0]}
        )
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                **extra,
            },
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.target_hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope.theta,
            "rope_scaling": None if self.rope.kind == "default" else scaling,
            "max_position_embeddings": self.max_position_embeddings,
            "vocab_size": self.vocab_size,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "layer_types": [LAYER_TYPES[bool(w)] for w in self.windows],
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": self.num_hidden_layers,
            "tie_word_embeddings": False,
            "use_cache": True,
            "dtype": dtype,
        }


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    found = [
        f"{key} ({meaning})"
        for key, meaning in UNSUPPORTED_DRAFTER_KEYS.items()
        if raw.get(key) not in (None, 0, False) and not _neutral(raw, key)
    ]
    if found:
        raise ConfigError(
            f"the drafter config asks for {', '.join(found)}, which this build does not support: "
            "use a DFlash v1 drafter"
        )


def _neutral(raw: Mapping[str, Any], key: str) -> bool:
    """Values that leave the arithmetic of DFlash v1 as it is."""
    if key == "draft_vocab_size":
        return raw[key] == raw.get("vocab_size")
    return key in ("output_multiplier", "input_embedding_scale") and raw[key] == 1.0


def _missing_layer_ids(raw: Mapping[str, Any], num_layers: int) -> str:
    depth = raw.get("num_target_layers")
    hint = ""
    if isinstance(depth, int) and depth > 4:
        guess = list(layer_ids_by_rule(depth, num_layers))
        hint = f"; {num_layers} layers spread evenly over {depth} would be {guess}"
    return (
        "the drafter config has no 'target_layer_ids' in dflash_config or at top level: they are a "
        f"choice of training and are not guessed; add them to config.json{hint}"
    )


def _layer_ids(raw: Mapping[str, Any]) -> tuple[int, ...]:
    ids = tuple(int(i) for i in raw["target_layer_ids"])
    depth = raw.get("num_target_layers")
    if not ids or len(set(ids)) != len(ids) or min(ids) < 0:
        raise ConfigError(f"target_layer_ids {list(ids)}: distinct block ids >= 0 are needed")
    if depth is not None and max(ids) >= depth:
        raise ConfigError(
            f"target_layer_ids {list(ids)} name block {max(ids)} of a target with "
            f"num_target_layers={depth}: ids run from 0 to {depth - 1}"
        )
    return ids


def _mask_id(raw: Mapping[str, Any], vocab_size: int) -> int:
    mask = raw.get("mask_token_id")
    if mask is None:
        raise ConfigError(
            "the drafter config has no 'mask_token_id' in dflash_config or at top level: it is the "
            "id the drafter was trained with and has no default"
        )
    if not 0 <= mask < vocab_size:
        raise ConfigError(
            f"mask_token_id {mask} is outside the vocabulary of {vocab_size} rows (0 to "
            f"{vocab_size - 1})"
        )
    return int(mask)


Speculation = Literal["dflash", "suffix", "none"]


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """What the user asked for; `None` = not set. Never mutated: `resolve` makes what is read."""

    max_seq_len: int | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_draft_len: int | None = None
    speculation: Speculation | None = None
    adaptive: bool = False
    kv_layout: Literal["contiguous", "paged"] = "contiguous"
    context_store: Literal["arena", "pool"] = "arena"
    page_size: int = 32
    attention: Literal["auto", "xla", "pallas", "cudnn"] = "auto"
    draft_attention: Literal["auto", "xla", "pallas"] = "auto"
    allocation_order: Literal["arena_first", "pool_first"] = "arena_first"
    kv_memory_fraction: float = 0.9
    kv_max_tokens: int | None = None
    kv_max_bytes: int | None = None
    device_memory: int | str | None = None
    headroom: Literal["measured", "seed"] = "measured"
    skip_context_budget_check: bool = False
    allow_token_limited: bool = False
    allow_unqualified: bool = False
    prefix_reuse: bool = True
    rounds_per_step: int = 1
    dtype: str = "auto"
    mesh: Any = None
    rope_scaling: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class ResolvedConfig:
    """What the engine reads: every number decided, nothing left to a default.

    `max_draft_len` is K, `verify_width` K + 1 (1 without a drafter) and `block_width` W the slots
    that the drafter evaluates (0 without one). `read_piece` is how many positions of an arena row
    attention reads at a time: a loop over what is filled (CPU), or the whole row at once (None).
    """

    target: TargetConfig
    drafter: DrafterConfig | None
    speculation: Speculation
    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int
    max_draft_len: int
    block_width: int
    dtype: str
    attention: str
    draft_attention: str
    read_piece: int | None
    mesh: Any

    @property
    def verify_width(self) -> int:
        """Target tokens that one row feeds in a round: the anchor and its K drafts."""
        return self.max_draft_len + 1
