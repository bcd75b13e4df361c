"""Shapes and bytes of what models hold and hand out, from their configs alone.

Pure integers, no JAX: a plan is made before a backend starts and faster than a model's structure
could be traced. Shapes are those the modules store; a test holds both to each other. How a mesh
divides them is `weights/sizes.py`.
"""

from dflash_jax.config import DrafterConfig, TargetConfig

ParameterPath = tuple[str | int, ...]
Shapes = dict[ParameterPath, tuple[int, ...]]
LOGITS_BYTES = 4
"""Logits are float32, whatever the dtype of the weights."""


def target_shapes(config: TargetConfig) -> Shapes:
    """Shape of every parameter of a target by path."""
    table = (config.vocab_size, config.hidden_size)
    shapes: Shapes = {("embed_tokens", "weight"): table, ("norm", "weight"): (config.hidden_size,)}
    if not config.tie_word_embeddings:
        shapes[("lm_head", "weight")] = table
    for layer in range(config.num_hidden_layers):
        shapes |= _block(
            layer,
            config,
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            mlp_bias=config.mlp_bias,
            qk_norm=config.qk_norm,
        )
    return shapes


def drafter_shapes(config: DrafterConfig) -> Shapes:
    """Shape of every parameter of a drafter by path, as its checkpoint has them.

    Embedding and head are the target's and not in here, unless the config says that it has them.
    """
    width = config.hidden_size
    shapes: Shapes = {
        ("fc", "weight"): (len(config.target_layer_ids) * config.target_hidden_size, width),
        ("hidden_norm", "weight"): (width,),
        ("norm", "weight"): (width,),
    }
    rows = config.draft_vocab_size or config.vocab_size
    if config.has_embed_tokens:
        shapes["embed_tokens", "weight"] = (config.vocab_size, width)
    if config.has_lm_head:
        shapes["lm_head", "weight"] = (rows, width)
    if config.draft_vocab_size is not None:
        shapes[("d2t",)] = (rows,)
    bias = config.attention_bias
    for layer in range(config.num_hidden_layers):
        shapes |= _block(layer, config, qkv_bias=bias, o_bias=bias, mlp_bias=False, qk_norm=True)
    return shapes


def gathered_head(config: DrafterConfig) -> Shapes:
    """The rows of the target's head that a reduced draft vocabulary gathers when it is loaded."""
    if config.draft_vocab_size is None or config.has_lm_head:
        return {}
    return {("lm_head", "weight"): (config.draft_vocab_size, config.hidden_size)}


def features_bytes(tokens: int, num_taps: int, hidden_size: int, dtype_bytes: int) -> int:
    """Bytes of the tapped features [t, a, e] of one pass."""
    return tokens * num_taps * hidden_size * dtype_bytes


def logits_bytes(rows: int, vocab_size: int) -> int:
    """Bytes of the logits [rows, v] of one pass."""
    return rows * vocab_size * LOGITS_BYTES


def _block(
    layer: int,
    config: TargetConfig | DrafterConfig,
    *,
    qkv_bias: bool,
    o_bias: bool,
    mlp_bias: bool,
    qk_norm: bool,
) -> Shapes:
    width, inner = config.hidden_size, config.intermediate_size
    q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    shapes: Shapes = {
        ("layers", layer, "input_layernorm", "weight"): (width,),
        ("layers", layer, "post_attention_layernorm", "weight"): (width,),
    }
    for owner, name, size, bias in (
        ("self_attn", "q_proj", (width, q), qkv_bias),
        ("self_attn", "k_proj", (width, kv), qkv_bias),
        ("self_attn", "v_proj", (width, kv), qkv_bias),
        ("self_attn", "o_proj", (q, width), o_bias),
        ("mlp", "gate_proj", (width, inner), mlp_bias),
        ("mlp", "up_proj", (width, inner), mlp_bias),
        ("mlp", "down_proj", (inner, width), mlp_bias),
    ):
        shapes |= _linear(("layers", layer, owner, name), size, bias)
    for name in ("q_norm", "k_norm") if qk_norm else ():
        shapes[("layers", layer, "self_attn", name, "weight")] = (config.head_dim,)
    return shapes


def _linear(path: ParameterPath, size: tuple[int, int], bias: bool) -> Shapes:
    shapes: Shapes = {(*path, "weight"): size}
    if bias:
        shapes[(*path, "bias")] = size[1:]
    return shapes
