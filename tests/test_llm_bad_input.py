"""What cannot be served is refused: clearly, early, and without harm to anything beside it.

First what `LLM` refuses from files and options, before anything is compiled and before JAX starts a
backend; then what a running engine refuses request by request; then what is left behind by calls
that end early. Numbers in messages are checked here; the rules alone in test_planning_rules.py.
"""

import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import jax
import jaxtyping
import numpy as np
import pytest

import dflash_jax as dj
from byte_tokenizer import byte_level, write_folder
from dflash_jax.serving import engine as engines
from dflash_jax.serving import llm as front
from dflash_jax.serving.compiles import CompileCounter
from tiny import write_drafter, write_target
from tiny_text import SPECIALS, VOCAB, write_text_drafter, write_text_target

SERVED = 64
SMALL: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": SERVED}
PARAMS = dj.SamplingParams(max_tokens=12, ignore_eos=True)
FIRST, SECOND, THIRD = [5, 17, 3, 88], [40, 2], [7, 7, 9, 200, 11]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A tiny pair with text; tests that change a folder write their own."""
    base = tmp_path_factory.mktemp("pair")
    return write_text_target(base / "target"), write_text_drafter(base / "drafter")


@pytest.fixture(scope="module")
def llm(folders) -> dj.LLM:
    return dj.LLM(*folders, **SMALL)


@pytest.fixture(scope="module")
def solo(llm) -> dict[tuple[int, ...], list[int]]:
    """What each prompt gives alone."""
    prompts = (FIRST, SECOND, THIRD)
    return {tuple(p): llm.generate([p], PARAMS)[0].token_ids for p in prompts}


@pytest.fixture
def no_compile(monkeypatch) -> Iterator[None]:
    """Fails the test if a program is built or loaded weights reach the engine."""

    def fail(*args: object, **kwargs: object) -> None:
        pytest.fail("something was compiled or loaded before the refusal")

    monkeypatch.setattr(engines, "compile_program", fail)
    monkeypatch.setattr(front, "load_target", fail)
    counter = CompileCounter()
    yield
    counter.close()
    assert counter.count == 0


@pytest.fixture
def as_a_user() -> Iterator[None]:
    """Calls as outside the test run, where no checker looks at types before the library does."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def refusal(target: Path, drafter: Path | None = None, **options: Any) -> str:
    """The message of the error that a start ends with."""
    with pytest.raises(dj.DFlashError) as refused:
        dj.LLM(target, drafter, **{**SMALL, **options})
    assert isinstance(refused.value, ValueError)
    return str(refused.value)


def tiny_pair(folder: Path, **drafter: Any) -> tuple[Path, Path]:
    return write_target(folder / "t"), write_drafter(folder / "d", **drafter)


# ------------------------------------------------------------------ refused at the start


@pytest.mark.parametrize(
    "changes, numbers",
    [
        ({"target_hidden_size": 48}, ("target_hidden_size is 48", "width is 32")),
        ({"vocab_size": 5000}, ("5000 ids", "97")),
        ({"num_target_layers": 36}, ("36 layers", "this one has 4")),
        (
            {
                "num_target_layers": None,
                "dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 7]},
            },
            ("block 7", "0 to 3"),
        ),
    ],
    ids=["width", "vocabulary", "depth", "layer ids"],
)
@pytest.mark.usefixtures("no_compile")
def test_a_drafter_made_for_another_target_is_refused_with_both_numbers(tmp_path, changes, numbers):
    message = refusal(*tiny_pair(tmp_path, **changes))
    assert all(number in message for number in numbers)
    assert "drafter of this target" in message or "must be equal" in message


@pytest.mark.usefixtures("no_compile")
def test_a_drafter_that_numbers_tokens_otherwise_is_refused_by_the_first_id(tmp_path, folders):
    """Fault 94: two byte tokenizers, one with ids 97 and 98 swapped."""
    tokenizer = byte_level(SPECIALS)
    drafter = write_folder(write_text_drafter(tmp_path / "d"), tokenizer)
    saved = drafter / "tokenizer.json"
    swapped = saved.read_text().replace('"a": 97', '"a": 98', 1).replace('"b": 98', '"b": 97', 1)
    assert swapped != saved.read_text()
    saved.write_text(swapped)
    message = refusal(folders[0], drafter)
    assert "id 97" in message and "'b'" in message and "'a'" in message


def test_a_drafter_that_brings_the_same_tokenizer_is_accepted(tmp_path, folders):
    """Fault 94, the other side."""
    drafter = write_folder(write_text_drafter(tmp_path / "d"), byte_level(SPECIALS))
    own = front._tokenizer(folders[0])
    assert front._check_tokenizers(own, drafter) is None


@pytest.mark.usefixtures("no_compile")
def test_a_served_length_beyond_the_positions_is_refused(tmp_path):
    message = refusal(write_target(tmp_path / "t"), max_seq_len=513)
    assert "max_seq_len=513" in message and "512 positions" in message
    assert "rope_scaling" in message


@pytest.mark.usefixtures("no_compile")
def test_a_block_wider_than_trained_is_refused(tmp_path):
    message = refusal(*tiny_pair(tmp_path), max_draft_len=4)
    assert "max_draft_len=4" in message and "max_draft_len <= 3" in message


@pytest.mark.usefixtures("no_compile")
def test_unknown_options_are_listed_with_what_there_is(tmp_path):
    message = refusal(write_target(tmp_path / "t"), max_tokens=5, batch=1)
    assert "max_tokens, batch" in message
    assert "max_seq_len" in message and "kv_layout" in message


@pytest.mark.usefixtures("no_compile")
def test_options_that_this_build_has_no_code_for_are_refused(tmp_path):
    message = refusal(write_target(tmp_path / "t"), kv_layout="paged", dtype="int8")
    assert "kv_layout='paged'" in message and "'contiguous'" in message
    assert "dtype='int8'" in message and "'bfloat16'" in message


@pytest.mark.parametrize("part", ["target", "drafter"])
@pytest.mark.usefixtures("no_compile")
def test_a_truncated_weight_file_is_refused_by_name(tmp_path, part):
    pair = dict(zip(("target", "drafter"), tiny_pair(tmp_path), strict=True))
    file = pair[part] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    message = refusal(pair["target"], pair["drafter"])
    assert "model.safetensors" in message


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip archive, not safetensors", b"\0" * 64])
@pytest.mark.usefixtures("no_compile")
def test_a_file_that_is_not_safetensors_is_refused_by_name(tmp_path, content):
    target = write_target(tmp_path / "t")
    (target / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in refusal(target)


@pytest.mark.usefixtures("no_compile")
def test_a_folder_without_a_config_is_refused(tmp_path):
    target, drafter = tiny_pair(tmp_path)
    (drafter / "config.json").unlink()
    message = refusal(target, drafter)
    assert str(drafter) in message and "config.json" in message
    (target / "config.json").unlink()
    message = refusal(target)
    assert str(target) in message and "config.json" in message


@pytest.mark.usefixtures("no_compile")
def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(dj.DFlashError, match="nowhere"):
        dj.LLM(tmp_path / "nowhere")


# A platform that JAX does not know: whoever starts a backend ends with another error.
GATE = """
import sys
import dflash_jax as dj
try:
    dj.LLM(sys.argv[1], sys.argv[2] or None, **eval(sys.argv[3]))
except dj.DFlashError as error:
    print("refused:", error)
"""


def in_a_fresh_process(target: Path, drafter: Path | str, options: dict[str, Any]) -> str:
    command = [sys.executable, "-c", GATE, str(target), str(drafter), repr(options)]
    run = subprocess.run(
        command, capture_output=True, text=True, env={"JAX_PLATFORMS": "none_such"}, check=False
    )
    return run.stdout + run.stderr


@pytest.mark.parametrize(
    "damage, options, expected",
    [
        ("weights", {}, "model.safetensors"),
        (None, {"max_seq_len": 513}, "512 positions"),
        (None, {"max_draft_len": 9}, "max_draft_len <= 3"),
        (None, {"dtype": "int8"}, "dtype='int8'"),
        ("tokenizer", {}, "id 97"),
    ],
    ids=["weights", "positions", "width", "dtype", "tokenizer"],
)
def test_files_and_options_are_refused_before_a_backend_starts(tmp_path, damage, options, expected):
    """Gate (i)."""
    if damage == "tokenizer":
        pair = write_text_target(tmp_path / "t"), write_text_drafter(tmp_path / "d")
        saved = write_folder(pair[1], byte_level(SPECIALS)) / "tokenizer.json"
        text = saved.read_text().replace('"a": 97', '"a": 98', 1).replace('"b": 98', '"b": 97', 1)
        saved.write_text(text)
    else:
        pair = tiny_pair(tmp_path)
    if damage == "weights":
        file = pair[1] / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    said = in_a_fresh_process(*pair, options)
    assert "refused:" in said and expected in said


def test_the_process_of_that_test_cannot_start_a_backend(tmp_path):
    """The control: with nothing to refuse it goes on and fails at the backend."""
    said = in_a_fresh_process(*tiny_pair(tmp_path), {})
    assert "refused:" not in said and "none_such" in said


# ------------------------------------------------------------------ refused by a running engine


@pytest.mark.parametrize(
    "prompt",
    [[], [-1], [VOCAB], [5, 10**9], [True], [1.0], ["5"], [None], [np.float32(2.5)], [[1]]],
    ids=repr,
)
@pytest.mark.usefixtures("as_a_user")
def test_a_prompt_that_is_empty_or_not_ids_is_refused(llm, prompt):
    with pytest.raises(dj.RequestError) as refused:
        llm.generate([prompt], PARAMS)
    message = str(refused.value)
    if prompt:
        assert repr(prompt[-1]) in message and f"0 to {VOCAB - 1}" in message
    else:
        assert "empty" in message


def test_an_empty_text_is_refused(llm):
    with pytest.raises(dj.RequestError, match="empty"):
        llm.generate("", PARAMS)


@pytest.mark.usefixtures("as_a_user")
def test_a_prompt_that_is_neither_text_nor_ids_is_refused(llm):
    answers = llm.generate([FIRST, 5], PARAMS)  # type: ignore[list-item]
    assert answers[1].finish_reason == "abort" and "neither text" in (answers[1].error or "")


@pytest.mark.usefixtures("as_a_user")
def test_whole_numbers_of_numpy_are_ids(llm, solo):
    for prompt in (np.asarray(FIRST, np.int64), [np.int32(token) for token in FIRST]):
        assert llm.generate([prompt], PARAMS)[0].token_ids == solo[tuple(FIRST)]  # type: ignore[list-item]


def test_no_prompts_give_no_answers(llm):
    assert llm.generate([], PARAMS) == []


@pytest.mark.parametrize(
    "length, max_tokens, total, remedy",
    [(1, 64, 65, "max_tokens <= 63"), (60, 5, 65, "max_tokens <= 4"),
     (63, 2, 65, "max_tokens <= 1"), (64, 1, 65, "shorter prompt"), (65, 1, 66, "shorter prompt")],
)  # fmt: skip
def test_a_request_beyond_the_served_length_is_refused_with_its_numbers(
    llm, length, max_tokens, total, remedy
):
    """Fault 38."""
    with pytest.raises(dj.RequestError) as refused:
        llm.generate([[3] * length], dj.SamplingParams(max_tokens=max_tokens))
    message = str(refused.value)
    assert f"{length} prompt tokens" in message and f"max_tokens={max_tokens}" in message
    assert f"= {total}" in message and f"served length of {SERVED}" in message
    assert remedy in message and f"max_seq_len >= {total}" in message


@pytest.mark.parametrize("length", [1, 32, 62, 63])
def test_a_request_that_fills_the_served_length_is_served_exactly(llm, length):
    """Fault 38, the other side."""
    room = SERVED - length
    answer = llm.generate([[3] * length], dj.SamplingParams(max_tokens=room, ignore_eos=True))[0]
    assert len(answer.token_ids) == room and answer.finish_reason == "length"


@pytest.mark.parametrize(
    "params, named",
    [
        (dj.SamplingParams(max_tokens=0), "max_tokens=0"),
        (dj.SamplingParams(temperature=-0.1), "temperature=-0.1"),
        (dj.SamplingParams(temperature=float("nan")), "temperature=nan"),
        (dj.SamplingParams(seed=-1), "seed=-1"),
        (dj.SamplingParams(top_p=0.9), "top_p=0.9"),
        (dj.SamplingParams(stop="x"), "stop='x'"),
        (dj.SamplingParams(n=2), "n=2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parameters_that_cannot_be_honoured_are_refused_by_name(llm, params, named):
    with pytest.raises(dj.RequestError) as refused:
        llm.generate([FIRST], params)
    assert named in str(refused.value)


def test_another_number_of_parameters_than_of_prompts_is_refused(llm):
    with pytest.raises(dj.RequestError, match="3 prompts came with 2 SamplingParams"):
        llm.generate([FIRST, SECOND, THIRD], [PARAMS, PARAMS])


def test_within_a_batch_only_the_bad_requests_are_refused(llm, solo, caplog):
    prompts = [FIRST, [VOCAB], SECOND, [], THIRD]
    answers = llm.generate(prompts, PARAMS)
    assert [answer.finish_reason for answer in answers] == [
        "length", "abort", "length", "abort", "length",
    ]  # fmt: skip
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer.finish_reason == "length":
            assert answer.token_ids == solo[tuple(prompt)] and answer.error is None
    assert str(VOCAB) in (answers[1].error or "") and "empty" in (answers[3].error or "")
    assert len(caplog.records) == 2
    assert answers[1].choices == [answers[1]]


def test_a_refused_stream_is_refused_when_it_is_asked_for(llm):
    with pytest.raises(dj.RequestError, match="empty"):
        llm.stream([], PARAMS)


def test_text_without_a_tokenizer_is_refused(llm, monkeypatch):
    monkeypatch.setattr(llm, "tokenizer", None)
    for ask in (llm.generate, llm.stream):
        with pytest.raises(dj.RequestError, match="tokenizer.json"):
            ask("text", PARAMS)
    with pytest.raises(dj.RequestError, match="tokenizer.json"):
        llm.chat([{"role": "user", "content": "text"}], PARAMS)
    assert llm.generate([FIRST], PARAMS)[0].text == ""


# ------------------------------------------------------------------ what is left behind


def assert_nothing_is_left(llm: dj.LLM) -> None:
    """No request waits or holds a slot, and no array of the arenas is a donated one."""
    assert not llm._batch.waiting
    assert llm._batch.slots == [None] * SMALL["max_batch_size"]
    leaves = jax.tree.leaves(llm._engine.state)
    assert not any(leaf.is_deleted() for leaf in leaves)


def finished(stream: Generator[str, None, dj.Completion]) -> tuple[str, dj.Completion]:
    """All pieces joined, and what the stream returns."""
    pieces = []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return "".join(pieces), end.value


TEXT = "ab"
LONG = dj.SamplingParams(max_tokens=40, ignore_eos=True)


def test_a_stream_gives_the_text_of_the_whole_answer(llm):
    text, answer = finished(llm.stream(TEXT, LONG))
    assert answer.token_ids == llm.generate([TEXT], LONG)[0].token_ids
    assert text == answer.text
    assert_nothing_is_left(llm)


def test_a_stream_left_early_frees_its_slot(llm, solo):
    for prompt in (TEXT, "cd", "ef"):
        stream = llm.stream(prompt, LONG)
        next(stream)
        stream.close()
        assert_nothing_is_left(llm)
    assert llm.generate([FIRST], PARAMS)[0].token_ids == solo[tuple(FIRST)]


def test_a_stream_that_was_never_read_holds_nothing(llm):
    streams = [llm.stream(TEXT, LONG) for _ in range(3)]
    for stream in streams:
        stream.close()
    assert_nothing_is_left(llm)


def test_two_streams_read_in_turn_give_what_each_gives_alone(llm):
    prompts = ("first", "and the second")
    alone = [finished(llm.stream(prompt, LONG)) for prompt in prompts]
    streams = [llm.stream(prompt, LONG) for prompt in prompts]
    texts, answers = ["", ""], {}
    while len(answers) < 2:
        for index, stream in enumerate(streams):
            if index in answers:
                continue
            try:
                texts[index] += next(stream)
            except StopIteration as end:
                answers[index] = end.value
    for index, (text, answer) in enumerate(alone):
        assert texts[index] == text
        assert answers[index].token_ids == answer.token_ids
    assert_nothing_is_left(llm)


class Broken(Exception):
    """Stands for anything that ends a call in the middle."""


def failing_at(count: int, call: Any) -> Any:
    """The same call, but the `count`-th one fails *after* it has done its work."""
    calls = iter(range(count))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        if next(calls, None) == count - 1:
            raise Broken
        return out

    return wrapped


@pytest.mark.parametrize("name", ["round", "prefill"])
@pytest.mark.parametrize("count", [1, 2])
def test_an_exception_in_the_middle_leaves_no_request_behind(llm, solo, monkeypatch, name, count):
    """Fault 103: also when the arenas have moved on and their report is lost."""
    with monkeypatch.context() as patch:
        patch.setattr(llm._engine, name, failing_at(count, getattr(llm._engine, name)))
        with pytest.raises(Broken):
            llm.generate([FIRST, SECOND, THIRD], PARAMS)
    assert_nothing_is_left(llm)
    again = llm.generate([FIRST, SECOND, THIRD], PARAMS)
    assert [answer.token_ids for answer in again] == list(solo.values())


def test_an_exception_in_a_progress_callback_leaves_no_request_behind(llm, solo, monkeypatch):
    def broken(*args: object) -> None:
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(llm, "_progress", broken)
        with pytest.raises(Broken):
            llm.generate([FIRST, SECOND, THIRD], PARAMS)
    assert_nothing_is_left(llm)
    assert llm.generate([SECOND], PARAMS)[0].token_ids == solo[tuple(SECOND)]


@pytest.mark.parametrize("program", ["prefill-32", "round-1-greedy"])
def test_a_program_that_fails_after_taking_its_arenas_leaves_whole_ones(
    llm, solo, monkeypatch, program
):
    """Fault 103: donated and never handed back."""
    failing = failing_at(1, llm.programs[program])
    before = llm.compiles_in_service
    with monkeypatch.context() as patch:
        patch.setitem(llm._engine.programs, program, failing)
        with pytest.raises(Broken):
            llm.generate([FIRST], PARAMS)
    assert_nothing_is_left(llm)
    assert llm.generate([FIRST], PARAMS)[0].token_ids == solo[tuple(FIRST)]
    assert llm.compiles_in_service == before


def test_a_stream_whose_round_was_lost_to_another_ends_and_says_so(llm, monkeypatch):
    """Its arenas may have moved without a report: a wrong text would be worse than none."""
    stream = llm.stream("first", LONG)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm._engine, "round", failing_at(1, llm._engine.round))
        with pytest.raises(Broken):
            llm.generate([SECOND], PARAMS)
    _, answer = finished(stream)
    assert answer.finish_reason == "abort" and "interrupted" in (answer.error or "")
    assert_nothing_is_left(llm)


def test_no_array_of_the_state_is_passed_twice(llm):
    """Fault 103: a buffer under two names cannot be donated."""
    leaves = [leaf for leaf in jax.tree.leaves(llm._engine.state) if leaf.size]
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_arenas_that_were_handed_out_are_donated_by_the_next_call(llm):
    """Fault 103: the old ones say so when they are read; the new ones are whole."""
    old = llm.arenas
    llm.generate([FIRST], PARAMS)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(old.kv.lengths)
    assert np.asarray(llm.arenas.kv.lengths).shape == (2,)
