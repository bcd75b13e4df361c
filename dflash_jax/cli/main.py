"""`dflash-jax`: the program that the commands hang on, and what becomes of an error.

Exit codes: 0 done, 1 failed, 2 wrong usage or a refused configuration. Command files import JAX
inside their functions, so that help is printed at once.
"""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import dflash_jax
from dflash_jax.cli.chat import chat
from dflash_jax.cli.convert import convert
from dflash_jax.cli.demo import demo
from dflash_jax.cli.doctor import doctor
from dflash_jax.cli.generate import generate
from dflash_jax.cli.logs import logs_on_terminal
from dflash_jax.cli.plan import plan
from dflash_jax.cli.serve import serve
from dflash_jax.cli.terminal import complain
from dflash_jax.cli.train import train
from dflash_jax.errors import DFlashError

DONE, FAILED, REFUSED = 0, 1, 2


class Program(TyperGroup):
    """Prints an error that was raised on purpose as one, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; raises `typer.Exit` with the code of what went wrong."""
        try:
            with logs_on_terminal(ctx.params["verbose"]):
                return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader of our output has gone: the caller ends the program in silence
        except (DFlashError, OSError) as error:
            complain(error)
            raise typer.Exit(exit_code(error)) from error


def exit_code(error: Exception) -> int:
    """2 for what the user asked for (the `ValueError`s of the tree), 1 for what failed."""
    return REFUSED if isinstance(error, DFlashError) and isinstance(error, ValueError) else FAILED


app = typer.Typer(
    cls=Program,
    name="dflash-jax",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, generate, chat, serve, plan, convert, train, doctor):
    app.command()(command)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(dflash_jax.__version__)
        raise typer.Exit(DONE)
    return wanted


@app.callback()
def program(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also show what the library logs on its way.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="And exit.")
    ] = False,
) -> None:
    """DFlash speculative decoding for JAX: the target's own text, in fewer passes."""


def main() -> None:
    """The entry point of `dflash-jax`."""
    app(prog_name="dflash-jax")
