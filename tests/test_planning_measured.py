"""What is read from compiled programs, whatever they leave out."""

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_jax.planning.measured import Measured, measure


class Program:
    """A compiled program that analyses as it is told to."""

    def __init__(self, analysis: Any):
        self._analysis = analysis

    def memory_analysis(self) -> Any:
        return self._analysis


def program(temp: Any, **more: Any) -> Program:
    return Program(SimpleNamespace(temp_size_in_bytes=temp, **more))


def test_the_largest_need_counts_and_not_the_sum():
    found = measure({"prefill": program(100), "round": program(700), "open": program(0)})
    assert found == Measured("round", 700, {"prefill": 100, "round": 700, "open": 0})


def test_outputs_in_fresh_memory_count_and_donated_ones_do_not():
    fresh = program(100, output_size_in_bytes=1000, alias_size_in_bytes=900)
    donated = program(150, output_size_in_bytes=1000, alias_size_in_bytes=1000)
    found = measure({"fresh": fresh, "donated": donated})
    assert found is not None
    assert found.programs == {"fresh": 200, "donated": 150} and found.program == "fresh"


def test_more_aliases_than_outputs_take_nothing_off():
    found = measure({"odd": program(100, output_size_in_bytes=5, alias_size_in_bytes=50)})
    assert found is not None and found.temporaries == 100


@pytest.mark.parametrize(
    "analyses",
    [
        [],
        [None],
        [SimpleNamespace()],
        [SimpleNamespace(temp_size_in_bytes=None)],
        [SimpleNamespace(temp_size_in_bytes=-1)],
        [SimpleNamespace(temp_size_in_bytes=0)],
        [SimpleNamespace(temp_size_in_bytes=0), None],
    ],
)
def test_programs_that_say_nothing_measure_nothing(analyses):
    """Fault 101: absent on some devices, 0 on others; neither is a finding."""
    programs = {f"program {i}": Program(analysis) for i, analysis in enumerate(analyses)}
    assert measure(programs) is None


def test_a_program_that_says_nothing_is_left_out_beside_those_that_do():
    found = measure({"silent": Program(None), "round": program(700)})
    assert found == Measured("round", 700, {"round": 700})


def test_other_fields_may_be_missing():
    """Fault 101."""
    found = measure({"round": program(700, output_size_in_bytes=None)})
    assert found is not None and found.temporaries == 700
