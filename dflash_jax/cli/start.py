"""Starting an `LLM` for a command, every wait of it under a bar.

The demo model is fetched here, before the engine asks for it, because only its own function reports
how far a download is. What was compiled is kept for the next start of a command: a program may
choose a folder for that, a library leaves JAX's settings alone. What the options mean is the
library's business.
"""

import logging
import tempfile
import time
from typing import TYPE_CHECKING, Any

from dflash_jax.cli.progress import Bars

if TYPE_CHECKING:
    from dflash_jax import LLM

logger = logging.getLogger(__name__)

# Programs of a model take seconds each; the helpers around them are not worth a file.
LEAST_COMPILE_SECONDS = 0.5


def start_llm(target: str, drafter: str | None, bars: Bars, **options: Any) -> "LLM":
    """The engine for a target and a drafter.

    Args:
        options: fields of `ServeConfig`; None means that the user did not say.

    Raises:
        ConfigError, CheckpointError, DownloadError: as `LLM`.
    """
    from dflash_jax import LLM

    keep_programs()
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


def keep_programs() -> None:
    """Has JAX keep what it compiles in `xla` of the cache folder, and find it there next time.

    A folder that the user chose (JAX_COMPILATION_CACHE_DIR) stands, and so does
    JAX_ENABLE_COMPILATION_CACHE=false, which turns all of it off. A folder that cannot be written
    costs compile time, nothing else: it is a warning.
    """
    import jax

    from dflash_jax.weights.demo import cache_folder

    settings: Any = jax.config
    chosen = settings.jax_compilation_cache_dir is not None
    if chosen or not settings.jax_enable_compilation_cache:
        return
    folder = cache_folder() / "xla"
    try:
        # What lies there is run: it is nobody else's to write.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        logger.warning(
            "compiled programs cannot be kept in %s: %s; the next start compiles them again. "
            "DFLASH_JAX_CACHE or JAX_COMPILATION_CACHE_DIR chooses another folder",
            folder,
            error,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_COMPILE_SECONDS)
