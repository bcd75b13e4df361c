"""A trained drafter as others load it: the published z-lab layout with a model card.

`config.json`, `model.safetensors` (bfloat16, published names, [out, in]) and `README.md` appear
together, in place of what was there, or not at all. Embedding and head stay the target's.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp

from dflash_jax.errors import CheckpointError
from dflash_jax.models import DFlashDrafter
from dflash_jax.weights.save import save_parameters
from dflash_jax.weights.staging import staged


def export_drafter(
    drafter: DFlashDrafter, folder: Path, card: str, *, max_bytes: int | None = None
) -> None:
    """Writes the drafter's folder.

    Args:
        card: text of `README.md`, as from `model_card`.
        max_bytes: refuse a weight file above this.

    Raises:
        CheckpointError: the weight file is too large; what was there before stays.
    """
    with staged(folder, overwrite=True) as partial:
        config = json.dumps(drafter.config.to_dict(), indent=2) + "\n"
        (partial / "config.json").write_text(config, encoding="utf-8")
        (partial / "README.md").write_text(card, encoding="utf-8")
        save_parameters(drafter, partial, kind="drafter", dtype=jnp.bfloat16)
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
        "the target verifies them, so the text is the target's own. Useless without the target, "
        "whose embedding and head it borrows.\n\n"
        f"{config.num_hidden_layers} layers, width {config.hidden_size}, MLP "
        f"{config.intermediate_size}, {config.num_attention_heads}/{config.num_key_value_heads} "
        f"heads of {config.head_dim}, block {config.block_size}, tapped blocks "
        f"{list(config.target_layer_ids)} of {config.num_target_layers}, mask id "
        f"{config.mask_token_id}.\n\n"
        f"Licence: Apache-2.0. Target: {target} ({target_licence}).\n"
    )
    sections = (("Data", data), ("Recipe", recipe), ("Figures", figures))
    return head + "".join(_section(title, values) for title, values in sections)


def _section(title: str, values: Mapping[str, object]) -> str:
    lines = "".join(f"- {key}: {value}\n" for key, value in values.items())
    return f"\n## {title}\n\n{lines}"
