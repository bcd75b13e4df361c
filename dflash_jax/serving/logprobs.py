"""From a pass's report to the log-probabilities of one row's tokens, as the answer carries them."""

from dflash_jax.decoding.report import RoundReport
from dflash_jax.serving.request import TokenLogprob


def token_logprobs(
    report: RoundReport, index: int, count: int, wanted: int | None
) -> list[TokenLogprob] | None:
    """The log-probabilities of the tokens that a pass committed.

    Args:
        index: the row of the report.
        count: its leading tokens that were committed.
        wanted: most likely tokens to name beside each; None: no log-probabilities.

    Returns:
        One for each token; None where the row wants none or the pass computed none.
    """
    found = report.logprobs
    if wanted is None or found is None:
        return None
    return [
        TokenLogprob(
            int(report.chosen[index, place]),
            float(found.chosen[index, place]),
            tuple(
                (int(token), float(value))
                for token, value in zip(
                    found.top_ids[index, place, :wanted],
                    found.top[index, place, :wanted],
                    strict=True,
                )
            ),
        )
        for place in range(count)
    ]
