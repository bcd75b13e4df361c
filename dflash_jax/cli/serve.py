"""`dflash-jax serve`: an OpenAI-compatible server of one target and its drafter.

Starts the engine, then listens; Ctrl-C lets open requests end, a second one ends them. What the
server answers is `serving/server.py`'s.
"""

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from dflash_jax.cli import options
from dflash_jax.cli.logs import LOGGER
from dflash_jax.cli.progress import Bars
from dflash_jax.cli.start import start_llm
from dflash_jax.cli.terminal import note
from dflash_jax.errors import ConfigError

logger = logging.getLogger(__name__)

KEY_VARIABLE = "DFLASH_JAX_API_KEY"
_LOCAL = ("127.0.0.1", "::1", "localhost")


def serve(
    target: options.TargetArgument,
    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter",
            "-d",
            help="Its DFlash drafter: a folder, a hub id or demo. Without it: plain decoding, but "
            "demo brings its own.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="The address to listen on; 0.0.0.0 is every one.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, help="0 is any free one.")
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            envvar=KEY_VARIABLE,
            show_envvar=True,
            help="What clients must send as Authorization: Bearer KEY. The variable keeps it out "
            "of the list of processes.",
        ),
    ] = None,
    max_queue: Annotated[
        int, typer.Option("--max-queue", min=0, help="Answers that may wait for a slot.")
    ] = 256,
    request_timeout: Annotated[
        float | None,
        typer.Option("--request-timeout", help="Seconds that a request may take in all."),
    ] = None,
    max_seq_len: options.MaxSeqLenOption = None,
    max_batch_size: options.MaxBatchSizeOption = None,
    max_num_tokens: options.MaxNumTokensOption = None,
    max_draft_len: options.MaxDraftLenOption = None,
    speculation: options.SpeculationOption = None,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="Stop drafting at loads where it does not pay.")
    ] = False,
    rounds_per_step: Annotated[
        int | None, typer.Option("--rounds-per-step", help="Rounds of one dispatch.")
    ] = None,
    prefix_reuse: Annotated[
        bool,
        typer.Option(
            "--prefix-reuse/--no-prefix-reuse", help="Take over prefixes that slots still hold."
        ),
    ] = True,
    allow_token_limited: options.AllowTokenLimitedOption = False,
    kv_layout: options.KVLayoutOption = None,
    context_store: options.ContextStoreOption = None,
    page_size: options.PageSizeOption = None,
    kv_memory_fraction: options.KVMemoryFractionOption = None,
    kv_max_tokens: options.KVMaxTokensOption = None,
    kv_max_bytes: options.KVMaxBytesOption = None,
    device_memory: options.DeviceMemoryOption = None,
    headroom: options.HeadroomOption = None,
    dtype: options.DtypeOption = None,
    attention: Annotated[
        str | None, typer.Option("--attention", help="Of the target: auto, xla, pallas or cudnn.")
    ] = None,
    draft_attention: Annotated[
        str | None, typer.Option("--draft-attention", help="Of the drafter: auto, xla or pallas.")
    ] = None,
    allow_unqualified: Annotated[
        bool,
        typer.Option("--allow-unqualified", help="Serve a combination that is not qualified."),
    ] = False,
) -> None:
    """Serve a model to many clients: /v1/chat/completions, /v1/completions and a chat page at /.

    Ctrl-C takes no new requests and waits for the open ones; a second Ctrl-C ends them.
    """
    _check(api_key, request_timeout)
    with _bound(host, port) as listener:
        with Bars() as bars:
            llm = start_llm(
                target,
                _drafter(target, drafter, speculation),
                bars,
                max_seq_len=max_seq_len,
                max_batch_size=max_batch_size,
                max_num_tokens=max_num_tokens,
                max_draft_len=max_draft_len,
                speculation=speculation,
                adaptive=adaptive or None,
                rounds_per_step=rounds_per_step,
                prefix_reuse=None if prefix_reuse else False,
                allow_token_limited=allow_token_limited or None,
                kv_layout=kv_layout,
                context_store=context_store,
                page_size=page_size,
                kv_memory_fraction=kv_memory_fraction,
                kv_max_tokens=kv_max_tokens,
                kv_max_bytes=kv_max_bytes,
                device_memory=options.bytes_or_text(device_memory),
                headroom=headroom,
                dtype=dtype,
                attention=attention,
                draft_attention=draft_attention,
                allow_unqualified=allow_unqualified or None,
            )
        if host not in _LOCAL and api_key is None:
            logger.warning(
                "%s can be reached from other machines and asks for no key: set --api-key", host
            )
        from dflash_jax.serving.listening import Server
        from dflash_jax.serving.server import make_app
        from dflash_jax.serving.service import Service

        with Service(llm, max_queue=max_queue, default_timeout=request_timeout) as service:
            app = make_app(service, model=_model_name(target), api_key=api_key)
            with _dated_log():
                Server(app, service, note).run(sockets=[listener])


def _check(api_key: str | None, request_timeout: float | None) -> None:
    """Refuses what can be refused before anything is loaded."""
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f'{error.name} is not installed, which serving needs: pip install "dflash-jax[serve]"'
        ) from error
    if api_key == "":
        raise ConfigError(
            f"the API key is empty: give one, or neither --api-key nor {KEY_VARIABLE}"
        )
    if request_timeout is not None and not request_timeout > 0:
        raise ConfigError(f"request_timeout={request_timeout:g}: a number of seconds above 0")


def _drafter(target: str, drafter: str | None, speculation: str | None) -> str | None:
    """The demo target comes with its drafter, unless another way of drafting was asked for."""
    from dflash_jax.weights.hub import DEMO

    brings_own = target == DEMO and drafter is None and speculation in (None, "dflash")
    return DEMO if brings_own else drafter


def _model_name(target: str) -> str:
    """What clients call it: a folder by its name, everything else as it was given."""
    folder = Path(target)
    return folder.resolve().name if folder.is_dir() else target


def _bound(host: str, port: int) -> socket.socket:
    """A socket that has the address, before minutes of start-up; nobody can connect yet.

    Raises:
        OSError: the address is taken or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --host or "
            "--port"
        ) from error
    return listener


@contextmanager
def _dated_log() -> Iterator[None]:
    """The log of a program that runs for days: each record with its time and its traceback."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in (LOGGER, "uvicorn")]
    before = [list(one.handlers) for one in loggers]
    for one in loggers:
        one.handlers = [handler]
    try:
        yield
    finally:
        for one, handlers in zip(loggers, before, strict=True):
            one.handlers = handlers
