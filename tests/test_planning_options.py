"""The public options are written down: a change of one shows up in review.

After a change on purpose: `python -m dflash_jax.planning.options > docs/options.md`, and
`python -m dflash_jax.planning.options --json > tests/data/options.json`.
"""

import json
from pathlib import Path

import pytest

import dflash_jax as dj
from dflash_jax.planning import options

ROOT = Path(__file__).resolve().parents[1]


def test_the_options_are_those_of_the_manifest():
    written = json.loads((ROOT / "tests/data/options.json").read_text(encoding="utf-8"))
    assert options.manifest() == written


def test_the_page_of_options_is_the_generated_one():
    assert (ROOT / "docs/options.md").read_text(encoding="utf-8") == options.markdown()


def test_every_option_says_what_it_does():
    assert all(one.help.endswith(".") and one.type for one in options.options())
    assert len(options.options()) == len({one.name for one in options.options()})


def test_an_unknown_option_is_refused_with_the_list():
    with pytest.raises(dj.ConfigError, match="unknown option max_seq_length; options: max_seq_len"):
        options.serve_config({"max_seq_length": 5})
