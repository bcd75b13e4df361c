"""A trained drafter as others load it: one of the published layouts with a model card.

`config.json`, `model.safetensors` (bfloat16, published names, [out, in]) and `README.md` appear
together, in place of what was there, or not at all. In the z-lab layout embedding and head stay
the target's, in the speculators layout they are copied.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp

from dflash_jax.config import DrafterConfig, Verifier
from dflash_jax.errors import CheckpointError
from dflash_jax.models import DFlashDrafter
from dflash_jax.weights.layouts import Layout, Tables, buffers_of, config_in_layout, in_layout
from dflash_jax.weights.save import save_parameters
from dflash_jax.weights.staging import staged


def export_drafter(
    drafter: DFlashDrafter,
    folder: Path,
    card: str,
    *,
    layout: Layout = "zlab",
    tables: Tables | None = None,
    max_bytes: int | None = None,
) -> None:
    """Writes the drafter's folder.

    Args:
        card: text of `README.md`, as from `model_card`.
        tables: of the target (`layouts.tables_of`, `layouts.read_tables`), for "speculators".
        max_bytes: refuse a weight file above this.

    Raises:
        CheckpointError: the weight file is too large, or the layout needs tables; what was there
            before stays.
    """
    drafter = in_layout(drafter, layout, tables)
    verifier = Verifier() if tables is None else tables.verifier
    raw = config_in_layout(drafter.config, layout, "bfloat16", verifier)
    with staged(folder, overwrite=True) as partial:
        config = json.dumps(raw, indent=2) + "\n"
        (partial / "config.json").write_text(config, encoding="utf-8")
        (partial / "README.md").write_text(card, encoding="utf-8")
        buffers = buffers_of(drafter, layout)
        save_parameters(drafter, partial, kind="drafter", dtype=jnp.bfloat16, buffers=buffers)
        size = sum(file.stat().st_size for file in partial.glob("*.safetensors"))
        if max_bytes is not None and size > max_bytes:
            raise CheckpointError(
                f"the drafter takes {size} bytes, more than the {max_bytes} allowed: use fewer "
                "layers or a narrower MLP"
            )


def model_card(
    drafter: DFlashDrafter,
    *,
    target: str,
    target_licence: str,
    data: Mapping[str, object],
    recipe: Mapping[str, object],
    figures: Mapping[str, object],
) -> str:
    """The text of a drafter's README: what it is for, what it was trained on, how good it is."""
    config = drafter.config
    head = (
        "---\nlicense: apache-2.0\nlibrary_name: dflash-jax\ntags:\n- dflash\n"
        "- speculative-decoding\n---\n\n"
        f"# A DFlash drafter for {target}\n\n"
        f"Proposes {config.trained_draft_len} tokens in one pass from the target's hidden states; "
        "the target verifies them, so the text is the target's own. Useless without the target"
        f"{_borrows(config)}.\n\n"
        f"{config.num_hidden_layers} layers, width {config.hidden_size}, MLP "
        f"{config.intermediate_size}, {config.num_attention_heads}/{config.num_key_value_heads} "
        f"heads of {config.head_dim}, block {config.block_size}, tapped blocks "
        f"{list(config.target_layer_ids)} of {config.num_target_layers}, mask id "
        f"{config.mask_token_id}.\n\n"
        f"Licence: Apache-2.0. Target: {target} ({target_licence}).\n"
    )
    sections = (("Data", data), ("Recipe", recipe), ("Figures", figures))
    return head + "".join(_section(title, values) for title, values in sections)


def _borrows(config: DrafterConfig) -> str:
    few = config.draft_vocab_size
    of = "" if few is None else f"; it proposes {few} of the target's ids (`d2t`)"
    return of if config.has_lm_head else f", whose embedding and head it borrows{of}"


def _section(title: str, values: Mapping[str, object]) -> str:
    lines = "".join(f"- {key}: {value}\n" for key, value in values.items())
    return f"\n## {title}\n\n{lines}"
