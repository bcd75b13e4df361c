"""The checks on a configuration, each a pure function from records to a finding or None.

A finding is one sentence: the number, what would be right, which option to change. `resolve.py`
runs them all and raises once with the whole list; nothing here raises, loads or asks a device.
"""

from dflash_jax.config import DTYPES, DrafterConfig, ServeConfig, TargetConfig


def wrong_pair(target: TargetConfig, drafter: DrafterConfig) -> list[str]:
    """What shows that a drafter was made for another target."""
    depth, findings = target.num_hidden_layers, []
    if drafter.num_target_layers not in (None, depth):
        findings.append(
            f"the drafter was made for a target of {drafter.num_target_layers} layers and this one "
            f"has {depth}: choose the drafter of this target"
        )
    if max(drafter.target_layer_ids) >= depth:
        findings.append(
            f"the drafter taps block {max(drafter.target_layer_ids)} and the target's blocks are 0 "
            f"to {depth - 1}: choose the drafter of this target"
        )
    borrows = not (drafter.has_embed_tokens and drafter.has_lm_head)
    for name, theirs, why in (
        ("target_hidden_size", drafter.target_hidden_size, "reads the target's hidden states"),
        ("hidden_size", drafter.hidden_size, "borrows the target's embedding and head"),
    ):
        if theirs != target.hidden_size and (borrows or name != "hidden_size"):
            findings.append(
                f"the drafter's {name} is {theirs} and the target's width is "
                f"{target.hidden_size}: it {why}, so both must be equal"
            )
    return findings


def wrong_vocabulary(
    target: TargetConfig, drafter: DrafterConfig, target_rows: int | None = None
) -> list[str]:
    """Ids that the two do not share; sizes that differ only in padding are fine.

    Args:
        target_rows: rows of the target's embedding where the files tell (padding included).
    """
    rows = max(target_rows or 0, target.vocab_size)
    findings = []
    if drafter.mask_token_id >= rows and not drafter.has_embed_tokens:
        findings.append(
            f"the drafter's mask_token_id {drafter.mask_token_id} has no row in the target's "
            f"embedding of {rows}: choose the drafter of this target"
        )
    # Published pairs pad to a multiple of at most 1024; more apart is another vocabulary.
    if abs(drafter.vocab_size - target.vocab_size) >= 1024:
        findings.append(
            f"the drafter's vocabulary has {drafter.vocab_size} ids and the target's "
            f"{target.vocab_size}: choose the drafter of this target"
        )
    return findings


def draft_len_above_trained(max_draft_len: int, drafter: DrafterConfig) -> str | None:
    """A block wider than the trained one has slots that were never trained."""
    trained = drafter.trained_draft_len
    if max_draft_len <= trained:
        return None
    return (
        f"max_draft_len={max_draft_len} is above the drafter's trained width: its blocks of "
        f"{drafter.block_size} give at most {trained} drafts; set max_draft_len <= {trained}"
    )


def draft_len_below_trained(max_draft_len: int, drafter: DrafterConfig) -> str | None:
    """A non-causal block narrower than the trained one draws lower acceptance; a warning."""
    trained = drafter.trained_draft_len
    if max_draft_len >= trained:
        return None
    return (
        f"max_draft_len={max_draft_len} is narrower than the drafter was trained for, which lowers "
        f"acceptance and makes a round cheaper: max_draft_len={trained} is the trained width"
    )


def drafting_ends_early(max_seq_len: int, drafter: DrafterConfig, block_width: int) -> str | None:
    """A served length beyond the drafter's positions; a warning.

    A row drafts while its context and one more block are within the positions: with c committed
    tokens the context is c - 1 long, so the last round that drafts starts at c = positions - W + 1.
    The served length of this engine is not inflated by what a round may overshoot, so there is no
    slack: equality is silent.
    """
    positions = drafter.max_position_embeddings
    if max_seq_len <= positions:
        return None
    return (
        f"the drafter was made for {positions} positions and max_seq_len is {max_seq_len}: a "
        f"request drafts up to token {positions - block_width + 1} (prompt and answer) and is "
        "decoded plainly from there, its text unchanged; lower max_seq_len or choose a drafter "
        "with more positions"
    )


def pool_options(config: ServeConfig) -> list[str]:
    """Options of a pool without one; refused, never ignored."""
    if config.kv_layout == "paged":
        return []
    defaults = {"kv_memory_fraction": 0.9, "kv_max_tokens": None, "kv_max_bytes": None}
    defaults |= {"context_store": "arena", "allocation_order": "arena_first"}
    return [
        f"{name}={getattr(config, name)!r} needs kv_layout='paged': a contiguous arena is sized by "
        "max_batch_size and max_seq_len"
        for name, default in defaults.items()
        if getattr(config, name) != default
    ]


def host_drafts_a_round(config: ServeConfig) -> list[str]:
    """Several rounds a dispatch leave no room for drafts that the host makes between rounds."""
    if config.speculation != "suffix" or config.rounds_per_step == 1:
        return []
    return [
        f"rounds_per_step={config.rounds_per_step} with speculation='suffix': the host drafts "
        "between rounds; set rounds_per_step=1"
    ]


def bad_choices(config: ServeConfig) -> list[str]:
    """Values outside an option's list, and a share outside (0, 1)."""
    found = [
        f"{name}={getattr(config, name)!r}: {' or '.join(map(repr, allowed))} is needed"
        for name, allowed in _CHOICES.items()
        if getattr(config, name) not in allowed
    ]
    share = config.kv_memory_fraction
    if not isinstance(share, (int, float)) or not 0 < share < 1:
        found.append(f"kv_memory_fraction={share!r}: a share between 0 and 1 is needed")
    return found


def beyond_positions(max_seq_len: int, target: TargetConfig) -> str | None:
    """A served length that the target's positions do not cover."""
    if max_seq_len <= target.max_position_embeddings:
        return None
    return (
        f"max_seq_len={max_seq_len} is beyond the target's {target.max_position_embeddings} "
        "positions: lower max_seq_len or set rope_scaling to extend them"
    )


def token_budget(max_batch_size: int, max_draft_len: int, max_num_tokens: int) -> str | None:
    """Every decoding row feeds 1 + K tokens to the target per step; equality is fine."""
    width = 1 + max_draft_len
    need = max_batch_size * width
    if need <= max_num_tokens:
        return None
    rows = max_num_tokens // width
    smaller = f"max_batch_size <= {rows}" if rows else "a smaller max_draft_len (no batch fits)"
    return (
        f"max_batch_size={max_batch_size} rows of 1 + {max_draft_len} tokens need {need} tokens a "
        f"step and max_num_tokens is {max_num_tokens}: set max_num_tokens >= {need} or {smaller}"
    )


_CHOICES: dict[str, tuple[object, ...]] = {
    "speculation": (None, "dflash", "suffix", "none"),
    "kv_layout": ("contiguous", "paged"),
    "context_store": ("arena", "pool"),
    "attention": ("auto", "xla", "pallas", "cudnn"),
    "draft_attention": ("auto", "xla", "pallas"),
    "allocation_order": ("arena_first", "pool_first"),
    "headroom": ("measured", "seed"),
    "dtype": DTYPES,
}
# Options whose other values later builds will have; refused by the engine, never ignored.
_BUILT: dict[str, tuple[object, ...]] = {
    "attention": ("auto", "xla"),
    "draft_attention": ("auto", "xla"),
}


def not_built(config: ServeConfig) -> list[str]:
    """Options that this build's engine cannot honour; a plan can be made with them."""
    return [
        f"{name}={getattr(config, name)!r} is not available in this build: use "
        f"{' or '.join(repr(value) for value in built)}"
        for name, built in _BUILT.items()
        if getattr(config, name) not in built
    ]


def bad_numbers(config: ServeConfig) -> list[str]:
    """Sizes that are not whole numbers of at least 1."""
    names = ("max_seq_len", "max_batch_size", "max_num_tokens", "max_draft_len", "page_size")
    names += ("kv_max_tokens", "kv_max_bytes", "rounds_per_step")
    values = {name: getattr(config, name) for name in names}
    return [
        f"{name}={value!r}: a whole number >= 1 is needed"
        for name, value in values.items()
        if value is not None
        and (isinstance(value, bool) or not isinstance(value, int) or value < 1)
    ]
