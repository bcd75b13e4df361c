"""Prompts from the command line and from a file: every form, and what is said of a bad line."""

import json
from pathlib import Path

import pytest

from dflash_jax.cli.prompts import Messages, prompts_from_file, prompts_from_words
from dflash_jax.errors import RequestError

LINES = {
    '"text"': "text",
    '{"prompt": "text", "source": "x"}': "text",
    "[1, 5]": [1, 5],
    '{"prompt": [1, 5]}': [1, 5],
    '{"turns": ["hi", "and then?"]}': Messages(({"role": "user", "content": "hi"},)),
    '{"messages": [{"role": "user", "content": "hi"}]}': Messages(
        ({"role": "user", "content": "hi"},)
    ),
}


def test_each_form_of_a_line_is_read_as_what_it_is(tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(LINES) + "\n")
    read = prompts_from_file(file)
    assert read == list(LINES.values())
    assert [type(one) for one in read] == [type(one) for one in LINES.values()]


@pytest.mark.parametrize(
    "line",
    ["{", "3", "null", "[1.5]", "[true]", '{"turns": []}', '{"messages": []}', '{"prompt": 3}'],
)
def test_a_line_without_a_prompt_is_named_by_its_number(line: str, tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"fine"\n' + line + "\n")
    with pytest.raises(RequestError, match="prompts.jsonl line 2 "):
        prompts_from_file(file)


@pytest.mark.parametrize("content", [b"", b" \n", json.dumps("é").encode("latin-1"), b'"\xe9"'])
def test_a_file_without_a_prompt_or_not_in_utf_8_is_refused(content: bytes, tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    if content == json.dumps("é").encode("latin-1"):
        assert prompts_from_file(file) == ["é"]  # escaped, so still ASCII
        return
    with pytest.raises(RequestError, match="no prompt|not UTF-8"):
        prompts_from_file(file)


def test_words_are_text_or_ids_as_asked():
    assert prompts_from_words(["1 5"], token_ids=False) == ["1 5"]
    assert prompts_from_words(["1 5", "7,8", "9"], token_ids=True) == [[1, 5], [7, 8], [9]]
