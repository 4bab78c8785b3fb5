"""``meshd ask`` and ``meshd chat``: answers in the terminal, streamed."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Annotated, Any, Final

import typer

from meshd.cli.failure import tell
from meshd.cli.room import Url, connect, text_of, typed
from meshd.client import Piece
from meshd.errors import MeshdError, UsageError

# What every node takes: a value outside is the caller's, whichever node there is (tests/cli/test_usage.py compares).
MAX_TOKENS: Final = 1_000_000
MAX_TEMPERATURE: Final = 10.0
MAX_SEED: Final = 2**63 - 1

MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, max=MAX_TOKENS, help="Longest answer in tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, max=MAX_TEMPERATURE, help="0 = greedy.")]
Seed = Annotated[
    int | None,
    typer.Option("--seed", min=-MAX_SEED - 1, max=MAX_SEED, help="The same seed draws the same tokens."),
]
System = Annotated[str | None, typer.Option("--system", help="A system message in front.")]


def ask(
    prompt: Annotated[str, typer.Argument(help="The question; - reads standard input.")],
    url: Url = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    system: System = None,
    seed: Seed = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: continue the text as it stands.")] = False,
    show_route: Annotated[bool, typer.Option("--show-route", help="Say afterwards who computed it.")] = False,
) -> None:
    """One answer, streamed. With several --url the answer goes on at another entry when one dies."""
    text = typed(lambda stdin: stdin.read()) if prompt == "-" else text_of(prompt, "PROMPT")
    if not (text if raw else text.strip()):  # a script's variable or file that holds nothing
        raise UsageError(f"{'standard input' if prompt == '-' else 'PROMPT'} is empty: there is nothing to answer")
    system = text_of(system, "--system") if system else None
    if raw and system:
        raise UsageError("--system is a message of the chat template, which --raw leaves out")
    body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    if raw:
        body["prompt"] = text
    else:
        body["messages"] = [
            *([{"role": "system", "content": system}] if system else []),
            {"role": "user", "content": text},
        ]
    with connect(url) as room:
        final = _print_stream(room.stream(**body))
    if show_route and final is not None:
        typer.echo(route_line(final), err=True)


def chat(
    url: Url = None,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = 0.7,
    system: System = None,
) -> None:
    """A conversation. Ctrl-C stops the answer only; Ctrl-D or /quit ends, /new starts afresh.

    On a terminal it goes on after a question that could not be answered, without it."""
    start = [{"role": "system", "content": text_of(system, "--system")}] if system else []
    messages = list(start)
    with connect(url) as room:
        while True:
            try:
                said = typed(lambda _: input("> ")).strip()
            except (EOFError, KeyboardInterrupt):
                typer.echo()
                return
            if said == "/quit":
                return
            if said == "/new":
                messages = list(start)
                continue
            if not said:
                continue
            known = len(messages)
            try:
                _print_stream(room.chat(messages, said, max_tokens=max_tokens, temperature=temperature))
            except KeyboardInterrupt:
                typer.echo(" [stopped]")
            except MeshdError as error:
                if not sys.stdin.isatty():  # a script hears of it by the exit status
                    raise
                tell(error.message)
                del messages[known:]


def _print_stream(answer: Generator[Piece, None, None]) -> Mapping[str, Any] | None:
    final = None
    begun = False
    try:
        with closing(answer) as pieces:  # whoever interrupts it ends the request
            for piece in pieces:
                if piece.text:
                    sys.stdout.write(piece.text)
                    sys.stdout.flush()
                    begun = True
                final = piece.final or final
    except MeshdError:
        sys.stdout.write("\n" if begun else "")  # what went wrong gets a line of its own
        raise
    sys.stdout.write("\n")
    return final


def route_line(answer: Mapping[str, Any]) -> str:
    """Who computed an answer, in a line: ``n1 0..15 8.1 ms -> n2 15..30 7.9 ms (cold), 31.2 tokens/s, recovered 1x``."""
    hops = " -> ".join(
        f"{hop['name']} {hop['layers'][0]}..{hop['layers'][1]} {hop.get('compute_ms', 0):.1f} ms"
        for hop in answer["route"]
    )
    line = f"{hops} ({answer['routing']['mode']}), {answer['timings']['tokens_per_s']:.1f} tokens/s"
    for lost in answer.get("recoveries", ()):
        line += f"; {lost['from']} -> {lost['to']} ({lost['reason']}) stalled {lost['stall_ms']:.0f} ms"
    return line
