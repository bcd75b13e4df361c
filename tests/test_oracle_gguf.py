"""The converted demo target against `transformers` reading the same GGUF file by itself."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.serving.text import Tokenizer
from dflash_jax.weights.demo import TARGET_SOURCE, cache_folder
from dflash_jax.weights.fetch import fetch_gguf
from test_serving_text_demo import PINNED

pytestmark = pytest.mark.oracle

# `transformers` ignores the pre-tokeniser that a GGUF file names, so it merges a run of spaces with
# what stands before a digit. For these texts llama.cpp, which reads the name, is the oracle
# (`test_serving_text_demo.py`).
DIGITS_AFTER_SPACES = {"x  42 y   7", "½ cup, x² and Ⅷ, ٣٤", "  12\n  34\n\n 5"}


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetch_gguf(TARGET_SOURCE, cache_folder(), tmp_path_factory.mktemp("gguf"))


def load(kind: Any, path: Path, **options: Any) -> Any:
    return kind.from_pretrained(str(path.parent), gguf_file=path.name, **options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_logits_equal_those_of_transformers_loading_the_same_gguf(demo_folder, gguf_file):
    import torch
    from transformers import AutoModelForCausalLM

    from dflash_jax.weights.load import load_target

    ids = Tokenizer.from_folder(demo_folder).chat_ids(
        [{"role": "user", "content": "How many divisors has 196? Write Python code, please."}]
    )
    theirs = load(AutoModelForCausalLM, gguf_file, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    del theirs
    logits, _ = load_target(demo_folder, dtype="float32").forward(jnp.asarray(ids, jnp.int32))
    np.testing.assert_allclose(np.asarray(logits), expected, rtol=0, atol=1e-3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_token_ids_and_chat_equal_those_of_transformers(demo_folder, gguf_file):
    from transformers import AutoTokenizer

    ours = Tokenizer.from_folder(demo_folder)
    theirs = load(AutoTokenizer, gguf_file)
    texts = [pinned["text"] for pinned in PINNED]
    for text in texts:
        same = theirs(text).input_ids == ours.encode(text)
        assert same is (text not in DIGITS_AFTER_SPACES), text
    from_folder = AutoTokenizer.from_pretrained(str(demo_folder))
    assert [from_folder(text).input_ids for text in texts] == [ours.encode(text) for text in texts]
    messages = [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "7 "}]
    for add_generation_prompt in (False, True):
        options = {"add_generation_prompt": add_generation_prompt}
        expected = from_folder.apply_chat_template(messages, return_dict=False, **options)
        assert ours.chat_ids(messages, **options) == expected
