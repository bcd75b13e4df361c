"""Which width adaptive drafting takes, against costs worked out by hand."""

import logging

import pytest

from dflash_jax.serving.adaptive import LEAST_ROUNDS, PROBE_EVERY, AdaptiveDrafting

WIDTHS = (7, 3, 0)
# Four rows: three accept two drafts, one accepts all. Shares 1, 1, 1/4, …, 1/4: a row's round
# commits 1 + 2 + 5/4 = 4.25 tokens at width 7, 1 + 2 + 1/4 = 3.25 at 3, and 1 without drafts.
ACCEPTED = {7: [2, 2, 2, 7], 3: [2, 2, 2, 3], 0: [0, 0, 0, 0]}


def played(adaptive: AdaptiveDrafting, costs: dict[int, float], rounds: int) -> list[int]:
    """The widths of so many rounds of four rows."""
    widths = []
    for _ in range(rounds):
        width = adaptive.width(4)
        adaptive.observe(4, width, costs[width], ACCEPTED[width])
        widths.append(width)
    return widths


@pytest.mark.parametrize(
    "costs, best",
    [
        # Per token: 1 / 4.25 = 0.235, 0.9 / 3.25 = 0.277, 0.8 / 1.
        ({7: 1.0, 3: 0.9, 0: 0.8}, 7),
        # 0.235 against 0.70 / 3.25 = 0.215.
        ({7: 1.0, 3: 0.70, 0: 0.5}, 3),
        # 0.235, 0.277 and 0.2.
        ({7: 1.0, 3: 0.9, 0: 0.2}, 0),
    ],
)
def test_the_cheapest_width_per_token_is_taken(
    costs: dict[int, float], best: int, caplog: pytest.LogCaptureFixture
):
    adaptive = AdaptiveDrafting(WIDTHS)
    with caplog.at_level(logging.INFO):
        widths = played(adaptive, costs, 40)
    first = 3 * LEAST_ROUNDS
    assert widths[:first] == [7] * LEAST_ROUNDS + [3] * LEAST_ROUNDS + [0] * LEAST_ROUNDS
    late = widths[first:]
    assert late.count(best) >= len(late) - 40 // PROBE_EVERY
    assert ("at 4 rows" in caplog.text) == (best != 7)


def test_every_width_is_probed_and_a_change_of_cost_is_found():
    adaptive = AdaptiveDrafting(WIDTHS)
    played(adaptive, {7: 1.0, 3: 0.9, 0: 0.2}, 3 * LEAST_ROUNDS)
    widths = played(adaptive, {7: 1.0, 3: 0.9, 0: 0.2}, 4 * PROBE_EVERY)
    assert set(widths) == set(WIDTHS)
    # Plain rounds become dear: drafting is taken up again.
    widths = played(adaptive, {7: 1.0, 3: 0.9, 0: 2.0}, 40)
    assert widths[-4:].count(7) >= 3


def test_loads_are_apart():
    adaptive = AdaptiveDrafting(WIDTHS)
    played(adaptive, {7: 1.0, 3: 0.9, 0: 0.2}, 40)
    assert adaptive.width(1) == 7


def test_the_note_gives_the_cost_of_every_width():
    adaptive, notes = AdaptiveDrafting(WIDTHS), []
    for _ in range(3 * LEAST_ROUNDS):
        width = adaptive.width(4)
        seconds = {7: 0.0425, 3: 0.0065, 0: 0.05}[width]
        notes.append(adaptive.observe(4, width, seconds, ACCEPTED[width]))
    assert [note for note in notes if note] == [
        "3 drafts at 4 rows: a token takes 10.00 ms with 7, 2.00 ms with 3, 50.00 ms with 0"
    ]
