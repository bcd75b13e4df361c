"""Runs an application on a socket until it is told to end: uvicorn, with a service that drains.

The first signal lets open requests end while new ones are refused, the second one ends them, the
third leaves at once.
"""

import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from dflash_jax.serving.service import Service

# What connections may still take after all requests have ended.
_CLOSING_SECONDS = 5


class Server(uvicorn.Server):
    """Listens for requests to a service.

    Args:
        say: called with a sentence when it is ready and at each signal.
    """

    def __init__(self, app: ASGIApp, service: Service, say: Callable[[str], None]):
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=_CLOSING_SECONDS,
            )
        )
        self._service, self._say = service, say
        self._endings = iter((self._drain, self._cut))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, and says where clients can come."""
        await super().startup(sockets=sockets)
        for one in sockets or ():
            self._say(f"listening on {address(one)} (Ctrl-C ends)")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes a signal; in a thread, for a handler must not wait for what it interrupted."""
        threading.Thread(target=next(self._endings, self._leave), daemon=True).start()

    def _drain(self) -> None:
        self._say("no new requests are taken; waiting for the open ones (Ctrl-C ends them)")
        self._service.drain()
        self.should_exit = True

    def _cut(self) -> None:
        self._say("ending the open requests")
        self._service.shutdown()
        self.should_exit = True

    def _leave(self) -> None:
        self.force_exit = self.should_exit = True


def address(listener: socket.socket) -> str:
    """Where a bound socket is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
