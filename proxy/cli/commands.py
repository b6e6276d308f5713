"""The commands of ``ullage``.

Exit codes are 0 for done, 1 for a result that scripts should stop at (an invalid file, a server that is not ready), and
2 for wrong usage, which is what Click, Typer's base, exits with after a wrong option
(https://click.palletsprojects.com/en/stable/exceptions/). ``ullage run`` exits with its client's code.

Every command imports what it needs itself: the settings take a quarter of a second to import, and the server more.
``ullage --help``, completion and the container's health check, which runs every few seconds, need neither.
"""

from __future__ import annotations

import difflib
import http.client
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from proxy.addresses import local_address
from proxy.cli.address import configured_address, readiness_status
from proxy.cli.options import (
    MISUSED,
    REFUSED,
    AddressOption,
    ConfigOption,
    HtmlOption,
    KeyOption,
    ModelOption,
    Overrides,
    PlotOption,
    UpstreamOption,
    fail,
    http_address,
    key_in,
    model_name,
    overrides_of,
    settings_of,
    variable_name,
)
from proxy.cli.run import run
from proxy.garbage import pause_collections, resume_collections
from proxy.imports import lean_imports

if TYPE_CHECKING:
    from proxy.cli.clients import Client
    from proxy.cli.explain import Fitted
    from proxy.cli.session_files import Session
    from proxy.settings import Settings


app = typer.Typer(
    name="ullage",
    help="A reverse proxy that keeps every conversation inside the model's window.",
    epilog="Exit codes: 0 done, 1 refused or invalid, 2 used wrongly.",
    no_args_is_help=True,
    add_completion=True,
    # A pretty traceback shows local variables, and some of these are keys:
    # https://typer.tiangolo.com/tutorial/exceptions/
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes as long to import as all the rest of the help
)


def main() -> None:
    """Run the command that ``sys.argv`` names; ends the process."""
    pause_collections()  # until the command has been found, in ``_options``
    app()


def _show_version(is_requested: bool) -> None:
    if is_requested:
        from proxy import version

        typer.echo(f"ullage {version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[  # noqa: ARG001 - its callback has shown it
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options of every command."""
    resume_collections()


@app.command()
def serve(
    config: ConfigOption = None,
    upstream: UpstreamOption = None,
    window: Annotated[int | None, typer.Option(help="Context window of model *, in tokens.", min=1)] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [default: 127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on [default: 8484].", min=0, max=65535)] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes [default: 1].", min=1)] = None,
    store: Annotated[str | None, typer.Option(help="embedded, memory or a redis:// URL.", metavar="URL")] = None,
) -> None:
    """Run the proxy.

    The first SIGTERM, or Ctrl-C, lets running requests finish; a second one ends them.
    """
    server = {"host": host, "port": port, "workers": workers}
    overrides = overrides_of(upstream, window)
    overrides.update({("server", name): value for name, value in server.items() if value is not None})
    if store is not None:
        overrides["store", "url"] = store
    with lean_imports():
        settings = _settings_to_serve(config, overrides)
        # Imported after the check of the settings, since the server takes half a second: a refusal comes at once.
        from proxy.fleet import run

    raise typer.Exit(run(settings, config, overrides))


def _settings_to_serve(config: Path | None, overrides: Overrides) -> Settings:
    """Return the settings; end the process if they have no upstream or would leave the proxy open to anyone."""
    from proxy.settings import serving_problem

    settings = settings_of(config, overrides)
    if not settings.upstreams:
        fail(MISUSED, "There is no upstream to serve. Try: ullage serve --upstream http://127.0.0.1:8000/v1")
    if (reason := serving_problem(settings)) is not None:
        fail(REFUSED, f"Refusing to serve: {reason}")
    return settings


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="YAML file to check.")],
    from_litellm: Annotated[
        bool, typer.Option("--from-litellm", help="It is LiteLLM's: print ours, and what has no counterpart.")
    ] = False,
) -> None:
    """Check a configuration file.

    Prints each problem with file, line, key and remedy, or what would be served.
    """
    if from_litellm:
        _convert(file)
        return
    from proxy.settings import serving_problem
    from proxy.startup import SUMMARY_INDENT, settings_summary
    from proxy.terminal import fold_lines

    settings = settings_of(file, {})
    refusal = serving_problem(settings)
    if refusal is not None:
        fail(REFUSED, f"{file}: would not be served: {refusal}")
    typer.echo(f"{file}: OK\n{fold_lines(settings_summary(settings, {}), sys.stdout, SUMMARY_INDENT)}")
    _warn_of_memory_instead(settings, file)


def _warn_of_memory_instead(settings: Settings, file: Path) -> None:
    """Print a warning if the embedded store cannot be used: ``serve`` would keep records in memory."""
    from proxy.store import EMBEDDED_ADVICE, embedded_problem

    if settings.store.url == "embedded" and (problem := embedded_problem(settings.store.path)):
        typer.echo(f"{file}: warning: {problem}\n    {EMBEDDED_ADVICE.capitalize()}.", err=True)


def _convert(file: Path) -> None:
    """Print LiteLLM's configuration as one of ours, and keys without a counterpart to standard error."""
    from proxy.cli.from_litellm import convert, to_yaml
    from proxy.cli.litellm_files import NotLiteLLM, read_file

    try:
        conversion = convert(read_file(file))
    except NotLiteLLM as error:
        fail(REFUSED, str(error))
    except OSError as error:  # of the file itself, or of one that it includes
        fail(MISUSED, f"{error.filename}: cannot be read: {error.strerror}.")
    typer.echo(to_yaml(conversion), nl=False)
    for note in conversion.notes:
        typer.echo(f"{file}: {note}", err=True)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the configuration file, for editors."""
    from proxy.features.settings import AllSettings

    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **AllSettings.model_json_schema()}
    typer.echo(json.dumps(document, indent=2))


@app.command()
def models(
    pattern: Annotated[str | None, typer.Argument(help="Name or glob; quote it.", metavar="PATTERN")] = None,
    config: ConfigOption = None,
    upstream: UpstreamOption = None,
    key_env: Annotated[
        str | None,
        typer.Option(
            help="Variable with a client's key: shows what its traffic taught.", metavar="NAME", callback=variable_name
        ),
    ] = None,
    wide: Annotated[bool, typer.Option("--wide", help="Show every column, wider than 80 characters.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per model.")] = False,
) -> None:
    """Show the windows of models, and their sources.

    Shows longest answers, encodings and count factors as well, and with --wide their sources: of configured models and
    of those that their servers list, or of all models whose names match PATTERN.
    """
    settings = settings_of(config, overrides_of(upstream))
    import asyncio
    from dataclasses import asdict

    from proxy.cli.models import list_models, show_models

    key = key_in(key_env)
    listing = asyncio.run(list_models(settings, pattern, key))
    for name, problem in listing.problems.items():
        typer.echo(f"{name}: {problem}", err=True)
    rows = [asdict(row) for row in listing.rows]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif rows:
        show_models(rows, wide=wide)
    if not rows and pattern is not None:
        fail(REFUSED, f"No model matches {pattern}.")
    if not rows:
        fail(REFUSED, "Nothing is configured. Try: ullage models 'gpt-5*', or give --upstream or --config.")


@app.command()
def doctor(
    upstream: Annotated[str | None, typer.Option(help="The server: http(s)://host/v1.", metavar="URL")] = None,
    model: Annotated[
        str | None, typer.Option(help="Model to ask [default: the first one listed].", callback=model_name)
    ] = None,
    config: ConfigOption = None,
    window: Annotated[int | None, typer.Option(help="Context window of the model, in tokens.", min=1)] = None,
    key_env: KeyOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Send the long request even where it may be billed.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds each request may take.", min=1)] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Examine a live server.

    Shows its window, how it reports overflow, and whether its counts agree with ours. Sends three short requests, of
    about 400 tokens each. Seeing how overflow is reported takes one that is longer than the window: it is sent to a
    server on this machine or network, to any other one only with --yes, since a provider that accepts it bills it.
    Exit code 1 if conversations cannot be kept inside the window.
    """
    key = key_in(key_env)
    if key_env and not key:
        fail(MISUSED, f"The environment variable {key_env} is not set, or empty.")
    settings = settings_of(config, overrides_of(upstream, window, model or "*"))
    if not settings.upstreams:
        fail(MISUSED, "There is no server to examine. Try: ullage doctor --upstream http://127.0.0.1:8000/v1")
    import asyncio
    from dataclasses import asdict

    from proxy.cli.doctor import examine, show_findings

    result = asyncio.run(examine(settings, model, key=key, oversize=yes, seconds=timeout))
    if as_json:
        typer.echo(json.dumps({**asdict(result), "healthy": result.healthy}, indent=2))
    else:
        show_findings(result)
    if not result.healthy:
        raise typer.Exit(REFUSED)


@app.command()
def replay(
    path: Annotated[Path, typer.Argument(help="Past conversations: a file, or a folder of files.", metavar="FILE|DIR")],
    window: Annotated[int | None, typer.Option(help="The model's window, in tokens.", min=1)] = None,
    model: Annotated[str, typer.Option(help="Model of conversations that name none.", callback=model_name)] = "gpt-5",
    top: Annotated[int, typer.Option(help="Rows of conversations, the largest ones.", min=1)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every conversation.")] = False,
    html: HtmlOption = None,
    plot: PlotOption = None,
    config: ConfigOption = None,
) -> None:
    """Show what Ullage would have done with past conversations.

    The total comes first, then the largest conversations, and what filled their windows without need. Needs no server
    and stores nothing. Reads OpenAI requests (JSON, JSON Lines) and the session files of Claude Code, Codex, opencode
    (export), Cline, Roo and Aider.
    """
    settings = settings_of(config, overrides_of(window=window))
    sessions, broken = _read_sessions(path)
    from proxy.cli.html_report import replay_page
    from proxy.cli.replay_output import draw_replays, replay_all, replays_as_json, show_replays

    replays = replay_all(settings, sessions, model)
    if as_json:
        typer.echo(json.dumps({**replays_as_json(replays), "broken_lines": broken}, indent=2))
    else:
        show_replays(replays, top)
    if not any(conversation.requests for conversation in replays):
        raise typer.Exit(REFUSED)
    if html is not None:
        _write_file(html, lambda: html.write_text(replay_page(replays), "utf-8"))
    if plot is not None:
        _write_file(plot, lambda: draw_replays(replays, plot))


def _write_file(file: Path, write: Callable[[], object]) -> None:
    """Call *write*, which writes *file*; end the process if it cannot be written."""
    try:
        write()
    except OSError as error:
        fail(MISUSED, f"{file}: cannot be written: {error.strerror}.")


def _read_sessions(path: Path) -> tuple[list[Session], dict[str, int]]:
    """Return the conversations at *path*, and the broken lines of files; end the process without a conversation.

    Broken lines are reported on standard error.
    """
    from proxy.cli.replay import find_files
    from proxy.cli.replay_output import broken_sentence

    try:
        files = list(find_files(path))
    except OSError as error:
        fail(MISUSED, f"{error.filename or path}: cannot be read: {error.strerror}.")
    broken = {file.name: file.broken for file in files if file.broken}
    if broken:
        typer.echo(broken_sentence(broken), err=True)
    sessions = [session for file in files for session in file.sessions]
    if not sessions:
        fail(REFUSED, f"{path}: no conversation found. Known are OpenAI requests and agents' session files.")
    return sessions, broken


@app.command()
def fit(
    request: Annotated[str, typer.Argument(help="A request's JSON body; - reads standard input.", metavar="REQUEST")],
    window: Annotated[int | None, typer.Option(help="The model's window, in tokens.", min=1)] = None,
    config: ConfigOption = None,
    model: Annotated[
        str | None, typer.Option(help="Treat it as a request for this model.", callback=model_name)
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show where the tokens are and what was done.")] = False,
    html: HtmlOption = None,
) -> None:
    """Print what would go upstream for a request.

    Needs no server and stores nothing. --explain shows where its tokens are instead, and what each stage did; --html
    writes the same into a file.
    """
    from proxy.core.errors import UllageError

    settings = settings_of(config, {})
    name, body = _read_request(request)
    import asyncio

    from proxy.cli.explain import CannotFit, fit_request

    try:
        fitted = asyncio.run(fit_request(settings, body, model=model, window=window))
        if explain or html:
            _explain(fitted, name, html, show=explain)
    except (UllageError, CannotFit) as error:
        fail(REFUSED, f"{name}: {error}")
    if fitted.error is not None:
        fail(REFUSED, f"{name}: {fitted.error.message}")
    if not explain and not html:
        sys.stdout.buffer.write(fitted.view.body)


def _read_request(name: str) -> tuple[str, bytes]:
    """Return the name of a request for messages, and its bytes in UTF-8; end the process if it cannot be read."""
    from proxy.cli.session_files import utf8_of

    if name == "-":
        return "standard input", utf8_of(sys.stdin.buffer.read())
    try:
        return name, utf8_of(Path(name).read_bytes())
    except OSError as error:
        fail(MISUSED, f"{name}: cannot be read: {error.strerror}. Give a file, or - for standard input.")


def _explain(fitted: Fitted, name: str, html: Path | None, *, show: bool) -> None:
    """Break down the tokens of the request called *name*: *show* them, and write them to *html* unless it is None."""
    from proxy.cli.explain import breakdown, render
    from proxy.cli.html_report import fit_page
    from proxy.cli.output import table_console

    result = breakdown(fitted)
    if show:
        render(result, table_console())
    if html is not None:
        _write_file(html, lambda: html.write_text(fit_page(name, result), "utf-8"))


@app.command()
def health(
    url: AddressOption = None,
) -> None:
    """Ask a running proxy if it is ready: exit 0 if so, else 1."""
    address = url or configured_address(os.environ)
    try:
        status = readiness_status(address)
    except ValueError as error:
        fail(MISUSED, f"{address} is no http(s) URL: {error}")
    except OSError as error:
        fail(REFUSED, f"{address} does not answer: {error.strerror or error}")
    except http.client.HTTPException as error:
        fail(REFUSED, f"{address} does not answer in HTTP: {error}")
    if status != http.client.OK:
        fail(REFUSED, f"not ready ({status})")
    typer.echo("ready")


@app.command()
def top(
    url: AddressOption = None,
    key_env: Annotated[
        str | None,
        typer.Option(help="Variable with the admin key of a remote proxy.", metavar="NAME", callback=variable_name),
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two readings.", min=0.2)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the figures once, as a pipe gets them.")] = False,
) -> None:
    """Watch a running proxy: requests, tokens, windows and its own health, by model. Ctrl-C ends it."""
    from proxy.cli.top import CannotRead, watch

    key = key_in(key_env)
    try:
        watch(url or configured_address(os.environ), key, interval, once=once)
    except CannotRead as error:
        fail(REFUSED, str(error))


@app.command()
def connect(
    client: Annotated[str | None, typer.Argument(help="Name of the client.", metavar="CLIENT")] = None,
    model: ModelOption = None,
    window: Annotated[int | None, typer.Option(help="Its window in tokens [default: the known one].", min=1)] = None,
    url: Annotated[
        str | None,
        typer.Option(help="The proxy's address [default: as configured].", metavar="URL", callback=http_address),
    ] = None,
    key: KeyOption = None,
    config: Annotated[Path | None, typer.Option(help="The proxy's YAML file.", metavar="FILE")] = None,
    roomy: Annotated[
        bool, typer.Option("--roomy", help="Write ten times the window, so that the client itself does not compact.")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="Change the client's files.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Put back what --write changed.")] = False,
) -> None:
    """Point a client at the proxy.

    Prints the client's configuration: the proxy's address and the model's window. --write changes the client's own
    files, --undo puts back what they held. Without CLIENT all clients are listed.
    """
    from proxy.cli import connect as commands
    from proxy.cli.clients import clients

    by_name = clients()
    if client is None:
        typer.echo(commands.client_list(by_name))
        return
    if write and undo:
        fail(MISUSED, "Give --write or --undo, not both.")
    chosen = _client_named(client, by_name)
    if chosen.needs_model and model is None and not undo:
        fail(MISUSED, f"The configuration of {chosen.title} names models: give --model NAME.")
    settings = settings_of(config, {})
    journal = settings.store.path / commands.JOURNAL
    try:
        if undo:
            lines = commands.undo(client, chosen, journal)
        else:
            from proxy.cli.models import client_facts

            address = url or local_address(settings.server.host, settings.server.port)
            facts = client_facts(settings, key or chosen.key, model, window)
            facts = facts.at(address, roomy=roomy)
            journal_to_write = None
            if write:
                journal_to_write = journal
            lines = commands.connect(client, chosen, facts, os.environ, journal_to_write)
    except (commands.ConnectError, OSError) as error:
        fail(REFUSED, commands.reason(error))
    typer.echo("\n".join(lines))


def _client_named(name: str, by_name: Mapping[str, Client]) -> Client:
    """Return the client called *name*; end the process if there is none."""
    if name not in by_name:
        advice = "`ullage connect` lists them."
        if similar := difflib.get_close_matches(name, by_name, n=1):
            advice = f"Did you mean {similar[0]}? {advice}"
        fail(MISUSED, f"No client is called {name}. {advice}")
    return by_name[name]


# Options behind the client's name are the client's own.
app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})(run)
