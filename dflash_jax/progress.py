"""How long work says how far it came."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as `progress(stage, done, total)`; a total of 0 means unknown. Files count in bytes."""
