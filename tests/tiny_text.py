"""A tiny pair that reads and writes text: random weights, a byte tokenizer, a chat template.

For the tests of the command line, which start from folders as a user's would. The answers are
noise, one byte a token; what matters is that both ways of decoding give the same noise.
"""

from pathlib import Path

from byte_tokenizer import FIRST_SPECIAL, byte_level, write_folder
from tiny import DRAFTER, TARGET, layer_shapes, random_tensors, write_checkpoint

SPECIALS = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|mask|>")
MASK = FIRST_SPECIAL + SPECIALS.index("<|mask|>")
VOCAB = FIRST_SPECIAL + len(SPECIALS)
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_text_target(folder: Path, *, template: str | None = TEMPLATE) -> Path:
    """A random Llama with a tokenizer; without a template it cannot chat."""
    config = {**TARGET, "vocab_size": VOCAB}
    e = config["hidden_size"]
    shapes = {
        "model.embed_tokens.weight": (VOCAB, e),
        "model.norm.weight": (e,),
        "lm_head.weight": (VOCAB, e),
    }
    for layer in range(config["num_hidden_layers"]):
        for name, shape in layer_shapes(config, qk_norm=False).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    write_checkpoint(folder, config, random_tensors(shapes, seed=3))
    settings = {"eos_token": "<|end|>"} | ({"chat_template": template} if template else {})
    return write_folder(folder, byte_level(SPECIALS), tokenizer_config=settings)


def write_text_drafter(folder: Path, **changes: object) -> Path:
    """A random drafter of that target; `changes` go into its config."""
    layout = {"mask_token_id": MASK, "target_layer_ids": [0, 2]}
    config = {**DRAFTER, "vocab_size": VOCAB, "dflash_config": layout, **changes}
    e = config["hidden_size"]
    shapes = {"fc.weight": (e, 2 * e), "hidden_norm.weight": (e,), "norm.weight": (e,)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in layer_shapes(config, qk_norm=True).items():
            shapes[f"layers.{layer}.{name}"] = shape
    return write_checkpoint(folder, config, random_tensors(shapes, seed=4))
