"""The command table: which module answers which command."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from meshd.cli import (
    admin,
    ask,
    bench,
    dashboard,
    demo,
    doctor,
    identity,
    keys,
    models,
    plan,
    qspec,
    service,
    tables,
    wait,
)
from meshd.errors import UsageError

app = typer.Typer(
    name="meshd",
    help="A room of unreliable devices serves one language model together.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"meshd {version('meshd')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del show_version


@app.command(
    "start",
    help="Run this device's node in the foreground.",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    add_help_option=False,
)
def _start() -> None:
    # Listed here for `meshd --help`; run() in cli/__init__.py takes it before typer is imported.
    raise UsageError("start comes first: meshd start …")


app.command("demo", short_help="A room on loopback that loses a node in mid-answer.")(demo.demo)
app.command("ask")(ask.ask)
app.command("chat")(ask.chat)
app.command("peers")(tables.peers)
app.command("hive")(tables.hive)
app.command("routes", short_help="The routes that this node measured, and their shares.")(tables.routes)
app.command("status")(tables.status)
app.command("wait", short_help="Wait until the room is as asked.")(wait.wait)
app.command("pull", short_help="Fetch a model into the store.")(models.pull)
app.command("models")(models.models)
app.command("rm")(models.remove)
app.command("qspec", short_help="Record a model's qspec again.")(qspec.qspec)
app.command("bench", short_help="Latency and tokens/s for one client and for several.")(bench.bench)
app.command("elect", short_help="The range that a device should take in a live room.")(plan.elect)
app.command("plan", short_help="Who would hold what in a room that does not exist.")(plan.plan)
app.command("drain")(admin.drain)
app.command("resume")(admin.resume)
app.command("doctor")(doctor.doctor)
app.command("dashboard")(dashboard.dashboard)
app.add_typer(keys.app, name="key")
app.add_typer(service.app, name="service")
app.add_typer(identity.app, name="identity")


def run_app(argv: list[str]) -> int:
    """Run one command; its exit status. MeshdError passes through to the caller."""
    try:
        status = app(args=argv, prog_name="meshd", standalone_mode=False)
    except typer.Abort:
        return 130
    except SystemExit as gone:
        # typer and rich end the program with 1 when whoever reads its output has seen enough; that is run()'s to judge.
        if isinstance(gone.__context__, BrokenPipeError):
            raise gone.__context__ from None
        raise
    except typer.TyperException as wrong:
        message = str(wrong.format_message())
        if "\n" in message:  # no command given: the message is the whole help
            print(message, file=sys.stderr)
            return 2
        ctx = getattr(wrong, "ctx", None)
        raise UsageError(f"{message.rstrip('.')}; see {ctx.command_path if ctx else 'meshd'} --help") from None
    return status if isinstance(status, int) else 0
