"""`SamplingParams` and the numbers it takes; what each option does is tested where it is done."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import dflash_jax as dj

pytestmark = pytest.mark.usefixtures("as_a_user")
WHOLE = [np.int8(5), np.int64(5), np.uint32(5), np.array(5)]
REAL = [np.float16(0.5), np.float32(0.5), np.float64(0.5)]


@pytest.mark.parametrize("number", WHOLE, ids=repr)
@pytest.mark.parametrize("name", ["max_tokens", "seed"])
def test_whole_numbers_of_numpy_are_taken_as_ints(name, number):
    given, plain = ({name: value} for value in (number, 5))
    params = dj.SamplingParams(**given)  # type: ignore[arg-type]
    params.check()
    assert type(getattr(params, name)) is int
    assert params == dj.SamplingParams(**plain)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", REAL, ids=repr)
def test_real_numbers_of_numpy_are_taken_as_floats(number):
    params = dj.SamplingParams(temperature=number)
    params.check()
    assert type(params.temperature) is float and params.temperature == 0.5


def test_a_whole_temperature_is_a_temperature():
    for one in (1, np.int32(1)):
        params = dj.SamplingParams(temperature=one)  # type: ignore[arg-type]
        params.check()
        assert params == dj.SamplingParams(temperature=1.0)


@pytest.mark.parametrize(
    "ids", [np.array([3, 4]), [np.int32(3), 4], (3, 4), np.array([3, 4], np.uint8)], ids=repr
)
def test_stop_ids_are_taken_from_lists_and_arrays(ids):
    params = dj.SamplingParams(stop_token_ids=ids)
    params.check()
    assert params.stop_token_ids == (3, 4)
    assert all(type(token) is int for token in params.stop_token_ids)


def test_defaults_of_numpy_are_defaults():
    """An option without code here may still be given at its default."""
    dj.SamplingParams(top_p=np.float32(1), top_k=np.int64(0), n=np.int8(1)).check()  # type: ignore[arg-type]
    with pytest.raises(dj.RequestError, match=r"top_k=3 is not supported"):
        dj.SamplingParams(top_k=np.int64(3)).check()  # type: ignore[arg-type]


def test_a_copy_with_changes_is_taken_as_numbers_too():
    params = dataclasses.replace(dj.SamplingParams(), max_tokens=np.int16(7))
    assert type(params.max_tokens) is int and params.max_tokens == 7


REFUSED: list[tuple[str, Any]] = [
    *(("max_tokens", value) for value in (True, np.True_, "5", 5.0, np.float32(5), None, [5])),
    *(("max_tokens", value) for value in (0, np.int64(0), np.array([5]))),
    *(("seed", value) for value in (True, np.True_, "5", 5.0, np.int64(-1), np.uint64(2**32))),
    *(("temperature", value) for value in (True, np.True_, "0.5", None, 1j, np.float32("nan"))),
    *(("temperature", value) for value in (np.float64("inf"), np.float32(-1), [0.5])),
    *(("stop_token_ids", value) for value in ([True], [np.True_], ["3"], [np.float32(3)])),
    *(("stop_token_ids", value) for value in (3, np.array(3), "3", [np.int64(-1)])),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=repr)
def test_what_is_no_number_of_that_kind_is_refused_by_name(name, value):
    with pytest.raises(dj.RequestError, match=f"{name}="):
        dj.SamplingParams(**{name: value}).check()
