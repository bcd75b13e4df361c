"""Counts compilations after start-up: in service there must be none, eager helpers included."""

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts from its creation on until `close`; one listener for each counter."""

    def __init__(self) -> None:
        self.count = 0
        self._listening = True
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _EVENT and self._listening:
            self.count += 1

    def close(self) -> None:
        """Stops counting."""
        self._listening = False
