"""Starting an `LLM` for a command, every wait of it under a bar.

The demo model is fetched here, before the engine asks for it, because only its own function reports
how far a download is. What the options mean is the library's business.
"""

import time
from typing import TYPE_CHECKING, Any

from dflash_jax.cli.progress import Bars

if TYPE_CHECKING:
    from dflash_jax import LLM


def start_llm(target: str, drafter: str | None, bars: Bars, **options: Any) -> "LLM":
    """The engine for a target and a drafter.

    Args:
        options: fields of `ServeConfig`; None means that the user did not say.

    Raises:
        ConfigError, CheckpointError, DownloadError: as `LLM`.
    """
    from dflash_jax import LLM

    fetch_demo(target, bars)
    given = {name: value for name, value in options.items() if value is not None}
    return LLM(target, drafter, progress=bars, **given)


def fetch_demo(name: str, bars: Bars) -> float:
    """Has the demo target in the cache if `name` is its name; the seconds that this took."""
    from dflash_jax.weights.demo import demo_target
    from dflash_jax.weights.hub import DEMO

    begun = time.perf_counter()
    if name == DEMO:
        demo_target(progress=bars)
    return time.perf_counter() - begun
