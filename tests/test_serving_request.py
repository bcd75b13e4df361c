"""`SamplingParams` and the values it takes; what each option does is tested where it is done."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.arena.sizes import MAX_BIAS
from dflash_jax.decoding.options import NO_ID, TOP_LOGPROBS
from dflash_jax.serving import option_rules
from dflash_jax.serving.request import MAX_SEED, DecodeStats, sample_seed

pytestmark = pytest.mark.usefixtures("as_a_user")
WHOLE = [np.int8(5), np.int64(5), np.uint32(5), np.array(5)]
REAL = [np.float16(0.5), np.float32(0.5), np.float64(0.5)]


@pytest.mark.parametrize("number", WHOLE, ids=repr)
@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "seed", "top_k", "n", "logprobs"])
def test_whole_numbers_of_numpy_are_taken_as_ints(name, number):
    given, plain = ({name: value} for value in (number, 5))
    params = dj.SamplingParams(**given)  # type: ignore[arg-type]
    params.check()
    assert type(getattr(params, name)) is int
    assert params == dj.SamplingParams(**plain)  # type: ignore[arg-type]


REALS = ["temperature", "top_p", "min_p"]
REALS += ["presence_penalty", "frequency_penalty", "repetition_penalty"]


@pytest.mark.parametrize("number", REAL, ids=repr)
@pytest.mark.parametrize("name", REALS)
def test_real_numbers_of_numpy_are_taken_as_floats(name, number):
    params = dj.SamplingParams(**{name: number})
    params.check()
    assert type(getattr(params, name)) is float and getattr(params, name) == 0.5


@pytest.mark.parametrize("name", REALS)
def test_a_whole_number_is_a_number(name):
    for one in (1, np.int32(1)):
        params = dj.SamplingParams(**{name: one})  # type: ignore[arg-type]
        params.check()
        assert type(getattr(params, name)) is float and getattr(params, name) == 1.0


@pytest.mark.parametrize(
    "ids", [np.array([3, 4]), [np.int32(3), 4], (3, 4), np.array([3, 4], np.uint8)], ids=repr
)
def test_stop_ids_are_taken_from_lists_and_arrays(ids):
    params = dj.SamplingParams(stop_token_ids=ids)
    params.check()
    assert params.stop_token_ids == (3, 4)
    assert all(type(token) is int for token in params.stop_token_ids)


def test_the_defaults_pass_and_so_do_all_bounds():
    dj.SamplingParams().check()
    for options in BOUNDS:
        dj.SamplingParams(**options).check()


BOUNDS: list[dict[str, Any]] = [
    {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "n": 1, "logprobs": 0, "seed": 0},
    {"temperature": 9999.9, "top_p": 1e-30, "top_k": 2**31 - 1, "min_p": 1, "n": 128},
    {"logprobs": 20, "seed": MAX_SEED, "max_tokens": 1, "min_tokens": 1, "stop": ["x"] * 16},
    {"presence_penalty": -2, "frequency_penalty": -2, "repetition_penalty": 1e-4},
    {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 1e4},
    {"logit_bias": {token: 100 - token % 201 for token in range(300)}, "speculate": False},
    {"stop_token_ids": [0, NO_ID - 1], "ignore_eos": True, "n": 3, "temperature": 0},
]


def test_minus_one_is_all_of_top_k_as_0_is():
    assert dj.SamplingParams(top_k=-1) == dj.SamplingParams(top_k=0)
    dj.SamplingParams(top_k=-1).check()


@pytest.mark.parametrize(
    "stop, texts",
    [("ab", ("ab",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ([], ()), ((), ()), (None, ())],
)
def test_stop_is_one_text_or_several_or_none(stop, texts):
    params = dj.SamplingParams(stop=stop)
    params.check()
    assert params.stop == texts


@pytest.mark.parametrize("biases", [{5: 1, 70: -2.5}, {"5": 1, "70": np.float32(-2.5)}], ids=repr)
def test_biases_are_taken_from_numbers_and_from_json(biases):
    params = dj.SamplingParams(logit_bias=biases)
    params.check()
    assert params.logit_bias == {5: 1.0, 70: -2.5}
    pairs = (params.logit_bias or {}).items()
    assert {(type(token), type(bias)) for token, bias in pairs} == {(int, float)}


def test_no_biases_are_none():
    assert dj.SamplingParams(logit_bias={}).logit_bias is None


def test_a_copy_with_changes_is_taken_as_numbers_too():
    params = dataclasses.replace(dj.SamplingParams(), max_tokens=np.int16(7))
    assert type(params.max_tokens) is int and params.max_tokens == 7


REFUSED: list[tuple[str, Any]] = [
    *(("max_tokens", value) for value in (True, np.True_, "5", 5.0, np.float32(5), None, [5])),
    *(("max_tokens", value) for value in (0, np.int64(0), np.array([5]))),
    *(("min_tokens", value) for value in (-1, True, 1.0, None)),
    *(("seed", value) for value in (True, np.True_, "5", 5.0, np.int64(-1), np.uint64(2**32))),
    *(("temperature", value) for value in (True, np.True_, "0.5", None, 1j, np.float32("nan"))),
    *(("temperature", value) for value in (np.float64("inf"), np.float32(-1), [0.5], 1e4, 10**400)),
    *(("top_p", value) for value in (0, -0.1, 1.001, float("nan"), "1", True, None)),
    *(("top_k", value) for value in (-2, 2**31, 1.0, True, None, "3")),
    *(("min_p", value) for value in (-0.01, 1.01, float("nan"), None)),
    *(("stop_token_ids", value) for value in ([True], [np.True_], ["3"], [np.float32(3)])),
    *(("stop_token_ids", value) for value in (3, np.array(3), "3", [np.int64(-1)], [NO_ID])),
    *(("stop", value) for value in ("", ["a", ""], [5], 5, b"ab", ["x"] * 17)),
    *(("ignore_eos", value) for value in (1, None, "yes")),
    *(("n", value) for value in (0, 129, 1.0, True, None)),
    *(("logprobs", value) for value in (-1, 21, True, 1.0)),
    *(("presence_penalty", value) for value in (-2.01, 2.01, float("nan"), None)),
    *(("frequency_penalty", value) for value in (-2.01, 2.01, float("inf"), "1")),
    *(("repetition_penalty", value) for value in (0, -1, 1e-5, 10001, float("nan"), None)),
    *(("logit_bias", value) for value in ({-1: 1}, {5: 100.5}, {"a": 1}, {True: 1}, {1.0: 1})),
    *(("logit_bias", value) for value in ({5: None}, {5: float("nan")}, [5], {"9" * 5000: 1})),
    ("logit_bias", dict.fromkeys(range(MAX_BIAS + 1), 1.0)),
    *(("speculate", value) for value in (1, None, "no")),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda value: repr(value)[:40])
def test_what_is_no_value_of_that_kind_is_refused_by_name(name, value):
    with pytest.raises(dj.RequestError, match=f"^{name}=[^;]* is needed$"):
        dj.SamplingParams(**{name: value}).check()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"top_p": 1.5}, "top_p=1.5: a number above 0, up to 1, is needed"),
        ({"top_k": -2}, "top_k=-2: a whole number from -1 to 2147483647 is needed"),
        ({"n": 200}, "n=200: a whole number from 1 to 128 is needed"),
        ({"logprobs": 21}, "logprobs=21: None or a whole number from 0 to 20 is needed"),
        ({"stop": ""}, "stop=('',): a text, or a list of up to 16, none of them empty, is needed"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 is beyond max_tokens=8: lower the one "
         "or raise the other"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_option_its_value_and_the_bounds(options, message):
    with pytest.raises(dj.RequestError) as error:
        dj.SamplingParams(**options).check()
    assert str(error.value) == message


def test_all_findings_come_at_once():
    params = dj.SamplingParams(top_p=0, n=0, min_tokens=3, max_tokens=2)
    with pytest.raises(dj.RequestError, match=r"^top_p=.*; n=.*; min_tokens=3 is beyond"):
        params.check()


def test_a_long_value_is_cut_short_and_counted():
    with pytest.raises(dj.RequestError) as error:
        dj.SamplingParams(stop=["x" * 1000] * 17).check()
    assert "(17 of them): a text, or a list of up to 16" in str(error.value)
    assert len(str(error.value)) < 250


def test_the_bounds_are_those_of_the_device():
    assert option_rules.MAX_LOGPROBS == TOP_LOGPROBS


# --- Seeds of several answers ------------------------------------------------------------------


def test_the_first_answer_has_the_seed_of_the_request():
    assert [sample_seed(seed, 0) for seed in (0, 7, MAX_SEED)] == [0, 7, MAX_SEED]


def test_a_thousand_pairs_have_a_thousand_seeds():
    """Neighbouring seeds and the highest one, 100 answers each."""
    seeds = [*range(9), MAX_SEED]
    mixed = [sample_seed(seed, index) for seed in seeds for index in range(100)]
    assert len(set(mixed)) == len(mixed) == 1000
    assert all(0 <= seed <= MAX_SEED for seed in mixed)


def test_every_bit_of_a_seed_changes_in_about_half_of_the_answers():
    """A counter would leave the high bits alone; 1,000 fair bits stay within 100 of 500."""
    mixed = np.array([sample_seed(1, index) for index in range(1, 1001)])
    set_bits = (mixed[:, None] >> np.arange(32)) & 1
    assert np.all(np.abs(set_bits.sum(0) - 500) < 100)


# --- Statistics --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens, left",
    [(0, [3, 1, 4]), (2, [3, 1, 2]), (4, [3, 1, 0]), (6, [2, 0, 0]), (9, [0, 0, 0])],
)
def test_tokens_that_were_cut_are_taken_off_the_last_rounds(tokens, left):
    """Fault 68. The ninth is the token that the prefill gave, which is no round's."""
    stats = DecodeStats(acceptance_lengths=[3, 1, 4], accepted_drafts_per_round=[2, 0, 5])
    stats.trim(tokens)
    assert stats.acceptance_lengths == left
    assert stats.num_rounds == 3 and stats.num_accepted_drafts == 7
