"""The command line. Exit codes: 0 done, 1 refused or invalid, 2 the command was used wrongly.

Every command imports what it needs itself: the settings take a quarter of a second to import and the server more, and
`ullage --help`, completion and the container's health check, run every few seconds, need neither.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

if TYPE_CHECKING:
    from proxy.cli.clients import Client, ClientFacts
    from proxy.settings import Settings, SettingsError

REFUSED = 1
MISUSED = 2

app = typer.Typer(
    name="ullage",
    help="A reverse proxy that keeps every conversation inside the model's window.",
    epilog="Exit codes: 0 done, 1 refused or invalid, 2 used wrongly.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,  # it shows local variables, keys among them
    rich_markup_mode=None,  # rich takes as long to import as all the rest of the help
)


def main() -> None:
    """Run the command that ``sys.argv`` names; ends the process."""
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        from proxy import version

        typer.echo(f"ullage {version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options of every command."""


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="YAML file; see `ullage check`.", metavar="FILE")] = None,
    upstream: Annotated[str | None, typer.Option(help="The only upstream: http(s)://host/v1.", metavar="URL")] = None,
    window: Annotated[int | None, typer.Option(help="Context window of model *, in tokens.", min=1)] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [default: 127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on [default: 8484].", min=0, max=65535)] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes [default: 1].", min=1)] = None,
    store: Annotated[str | None, typer.Option(help="embedded, memory or a redis:// URL.", metavar="URL")] = None,
) -> None:
    """Serve until told to stop."""
    from proxy.settings import open_proxy_problem

    overrides: dict[tuple[str, ...], object] = {
        ("models", "*", "context_window"): window,
        ("server", "host"): host,
        ("server", "port"): port,
        ("server", "workers"): workers,
        ("store", "url"): store,
        # Replaces the file's list whole: a key configured for one server must never go to another.
        ("upstreams",): None if upstream is None else [{"name": "upstream", "base_url": upstream}],
    }
    given = {path: value for path, value in overrides.items() if value is not None}
    settings = _settings(config, given)
    if not settings.upstreams:
        typer.echo("There is no upstream to serve. Try: ullage serve --upstream http://127.0.0.1:8000/v1", err=True)
        raise typer.Exit(MISUSED)
    if (reason := open_proxy_problem(settings)) is not None:
        typer.echo(f"Refusing to serve: {reason}", err=True)
        raise typer.Exit(REFUSED)
    # Only now: a refusal should come at once, and the server takes a second to import.
    from proxy.app import run

    raise typer.Exit(run(settings))


@app.command()
def check(file: Annotated[Path, typer.Argument(help="YAML file to check.")]) -> None:
    """Say what is wrong with a configuration file: file, line, key and remedy."""
    from proxy.settings import open_proxy_problem
    from proxy.startup import settings_summary

    settings = _settings(file, {})
    refusal = open_proxy_problem(settings)
    if not settings.upstreams:
        refusal = "no upstream is configured. Add one under upstreams, with name and base_url."
    if refusal is not None:
        typer.echo(f"{file}: would not be served: {refusal}", err=True)
        raise typer.Exit(REFUSED)
    typer.echo(f"{file}: OK\n{settings_summary(settings, {})}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of the configuration file, for editors."""
    from proxy.features.settings import AllSettings

    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **AllSettings.model_json_schema()}
    typer.echo(json.dumps(document, indent=2))


@app.command()
def models(
    pattern: Annotated[str | None, typer.Argument(help="Name or glob; quote it.", metavar="[PATTERN]")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file; see `ullage check`.", metavar="FILE")] = None,
    upstream: Annotated[str | None, typer.Option(help="The only upstream: http(s)://host/v1.", metavar="URL")] = None,
    key_env: Annotated[
        str | None, typer.Option(help="Environment variable with a client's key: what its traffic taught.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per model.")] = False,
) -> None:
    """Show each model's window, limits, encoding and count factor, and where the window comes from."""

    overrides: dict[tuple[str, ...], object] = {}
    if upstream is not None:
        overrides["upstreams",] = [{"name": "upstream", "base_url": upstream}]
    settings = _settings(config, overrides)
    import asyncio
    from dataclasses import asdict

    from proxy.cli.models import list_models

    found = asyncio.run(list_models(settings, pattern, os.environ.get(key_env, "") if key_env else ""))
    for name, trouble in found.problems.items():
        typer.echo(f"{name}: {trouble}", err=True)
    rows = [asdict(row) for row in found.rows]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif rows:
        from proxy.cli.models import show_models

        show_models(rows)
    if not rows:
        nothing = "Nothing is configured. Try: ullage models 'gpt-5*', or give --upstream or --config."
        typer.echo(nothing if pattern is None else f"No model matches {pattern}.", err=True)
        raise typer.Exit(REFUSED)


@app.command()
def doctor(
    upstream: Annotated[str | None, typer.Option(help="The server: http(s)://host/v1.", metavar="URL")] = None,
    model: Annotated[str | None, typer.Option(help="Model to ask [default: the first one listed].")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file; see `ullage check`.", metavar="FILE")] = None,
    window: Annotated[int | None, typer.Option(help="Context window of the model, in tokens.", min=1)] = None,
    key_env: Annotated[str | None, typer.Option(help="Environment variable with the key.", metavar="NAME")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Send the long request even where it may be billed.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds each request may take.", min=1)] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Ask a live server what matters: its window, how it reports overflow, whether its counts agree with ours.

    Sends three short requests, of about 400 tokens each. Whether overflow is reported takes one that is longer than
    the window: it is sent to a server on this machine or network, to any other one only with --yes, since a provider
    that accepts it bills it. Exit code 1 if something stands in the way.
    """

    if key_env is not None and not os.environ.get(key_env):
        typer.echo(f"The environment variable {key_env} is not set, or empty.", err=True)
        raise typer.Exit(MISUSED)
    overrides: dict[tuple[str, ...], object] = {}
    if upstream is not None:
        overrides["upstreams",] = [{"name": "upstream", "base_url": upstream}]
    if window is not None:
        overrides["models", model or "*", "context_window"] = window
    settings = _settings(config, overrides)
    if not settings.upstreams:
        typer.echo("There is no server to ask. Try: ullage doctor --upstream http://127.0.0.1:8000/v1", err=True)
        raise typer.Exit(MISUSED)
    import asyncio
    from dataclasses import asdict

    from proxy.cli.doctor import examine

    key = os.environ[key_env] if key_env else ""
    found = asyncio.run(examine(settings, model, key=key, oversize=yes, seconds=timeout))
    if as_json:
        typer.echo(json.dumps({**asdict(found), "healthy": found.healthy}, indent=2))
    else:
        from proxy.cli.doctor import show_findings

        show_findings(found)
    raise typer.Exit(0 if found.healthy else REFUSED)


@app.command()
def replay(
    place: Annotated[
        Path, typer.Argument(help="Past conversations: a file, or a folder of files.", metavar="FILE|DIR")
    ],
    window: Annotated[int | None, typer.Option(help="The model's window, in tokens.", min=1)] = None,
    model: Annotated[str, typer.Option(help="Model of conversations that do not say theirs.")] = "gpt-5",
    plot: Annotated[Path | None, typer.Option(help="Draw pressure over time into this PNG.", metavar="FILE")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file; see `ullage check`.", metavar="FILE")] = None,
) -> None:
    """Show what would have become of past conversations. Asks no server and keeps nothing.

    Reads OpenAI requests (JSON, JSON Lines) and the session files of Claude Code, Codex, opencode (export), Cline, Roo
    and Aider.
    """

    overrides: dict[tuple[str, ...], object] = {}
    if window is not None:
        overrides["models", "*", "context_window"] = window
    settings = _settings(config, overrides)
    from proxy.cli.replay import find_sessions

    try:
        sessions = list(find_sessions(place))
    except OSError as error:
        typer.echo(f"{place}: cannot be read: {error.strerror}.", err=True)
        raise typer.Exit(MISUSED) from error
    if not sessions:
        typer.echo(f"{place}: no conversation found. Known are OpenAI requests and agents' session files.", err=True)
        raise typer.Exit(REFUSED)
    from proxy.cli.replay_output import CannotPlot, draw_replays, replay_all, show_replays

    found = replay_all(settings, sessions, model)
    show_replays(found)
    if plot is not None:
        try:
            draw_replays(found, plot)
        except CannotPlot as error:
            typer.echo(f"{plot}: {error}", err=True)
            raise typer.Exit(REFUSED) from error
        except OSError as error:
            typer.echo(f"{plot}: cannot be written: {error.strerror}.", err=True)
            raise typer.Exit(MISUSED) from error


@app.command()
def fit(
    request: Annotated[str, typer.Argument(help="A request's JSON body; - reads standard input.", metavar="REQUEST")],
    window: Annotated[int | None, typer.Option(help="The model's window, in tokens.", min=1)] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file; see `ullage check`.", metavar="FILE")] = None,
    model: Annotated[str | None, typer.Option(help="Treat it as a request for this model.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show where the tokens are and what was done.")] = False,
) -> None:
    """Print what would go upstream for a request, or explain it. Asks no server and keeps nothing."""
    from proxy.core.errors import UllageError
    from proxy.settings import SettingsError, load

    try:
        settings = load(config, {}, os.environ)
        name, body = _read_request(request)
    except SettingsError as error:
        _complain(error)
        raise typer.Exit(REFUSED) from error
    except OSError as error:
        typer.echo(f"{request}: cannot be read: {error.strerror}. Give a file, or - for standard input.", err=True)
        raise typer.Exit(MISUSED) from error
    import asyncio

    from proxy.cli.explain import CannotFit, breakdown, fit_request, render

    try:
        found = asyncio.run(fit_request(settings, body, model=model, window=window))
        if explain:
            shown = breakdown(found)
    except (UllageError, CannotFit) as error:
        typer.echo(f"{name}: {error}", err=True)
        raise typer.Exit(REFUSED) from error
    if explain:
        from rich.console import Console

        render(shown, Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200))
    if found.error is not None:
        typer.echo(f"{name}: {found.error.message}", err=True)
        raise typer.Exit(REFUSED)
    if not explain:
        sys.stdout.buffer.write(found.view.body)


def _read_request(name: str) -> tuple[str, bytes]:
    """What to call the request in messages, and its bytes. Raises ``OSError``."""
    if name == "-":
        return "standard input", sys.stdin.buffer.read()
    return name, Path(name).read_bytes()


@app.command()
def health(
    url: Annotated[str | None, typer.Option(help="The proxy's address [default: the configured port].")] = None,
) -> None:
    """Ask a running proxy whether it is ready; exit 0 if so, else 1."""
    address = url or configured_address(os.environ)
    try:
        status = readiness_status(address)
    except ValueError as error:
        typer.echo(f"{address} is no http(s) URL: {error}", err=True)
        raise typer.Exit(MISUSED) from error
    except (OSError, http.client.HTTPException) as error:
        typer.echo(f"{address} does not answer: {error}", err=True)
        raise typer.Exit(REFUSED) from error
    typer.echo("ready" if status == http.client.OK else f"not ready ({status})", err=status != http.client.OK)
    raise typer.Exit(0 if status == http.client.OK else REFUSED)


@app.command()
def connect(
    client: Annotated[str | None, typer.Argument(help="Its name; none: list them.", metavar="[CLIENT]")] = None,
    model: Annotated[str | None, typer.Option(help="The model it is to ask for.")] = None,
    window: Annotated[int | None, typer.Option(help="Its window in tokens [default: what is known].", min=1)] = None,
    url: Annotated[str | None, typer.Option(help="The proxy's address [default: the configured port].")] = None,
    key: Annotated[str | None, typer.Option(help="Environment variable that holds the key.", metavar="NAME")] = None,
    config: Annotated[Path | None, typer.Option(help="The proxy's YAML file.", metavar="FILE")] = None,
    roomy: Annotated[bool, typer.Option(help="Tell ten times the window: the client's own compaction rests.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Change the client's files.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Put back what --write changed.")] = False,
) -> None:
    """Print, write or take back a client's configuration: where the proxy is, and how large the window."""
    import asyncio

    from proxy.cli import connect as clients_of
    from proxy.cli.clients import clients
    from proxy.cli.models import limits

    known = clients()
    if client is None:
        _list_clients(known)
        return
    settings = _settings(config, {})
    journal = settings.store.path / clients_of.JOURNAL
    chosen = known.get(client)
    if problem := _misused(client, chosen, write and undo, model is None and not undo):
        typer.echo(problem, err=True)
        raise typer.Exit(MISUSED)
    assert chosen is not None
    try:
        if undo:
            said = clients_of.undo(client, chosen, journal)
        else:
            known_window, output = asyncio.run(limits(settings, model)) if model else (None, None)
            root = (url or configured_address(os.environ)).rstrip("/").removesuffix("/v1")
            facts = _client_facts(root, key or chosen.key, model, window or known_window, output, roomy=roomy)
            said = clients_of.connect(client, chosen, facts, os.environ, journal if write else None)
    except (clients_of.ConnectError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(REFUSED) from error
    typer.echo("\n".join(said))


def _list_clients(known: Mapping[str, Client]) -> None:
    for name, each in known.items():
        typer.echo(f"{name:16}{each.title} ({each.api})")


def _client_facts(
    root: str, key: str, model: str | None, window: int | None, output: int | None, *, roomy: bool
) -> ClientFacts:
    """Return what a client is configured with; if *roomy*, it takes the window for ten times as large as it is."""
    from proxy.cli.clients import ClientFacts

    believed = window * 10 if window and roomy else window
    return ClientFacts(root, key, model, believed, output, window)


def _misused(name: str, client: Client | None, both: bool, nameless: bool) -> str:
    """What is wrong with how `ullage connect` was used; empty if nothing is."""
    if client is None:
        return f"No client is called {name}. `ullage connect` lists them."
    if both:
        return "Give --write or --undo, not both."
    if client.needs_model and nameless:
        return f"{client.title} wants to be told its models: give --model NAME."
    return ""


def _settings(config: Path | None, overrides: Mapping[tuple[str, ...], object]) -> Settings:
    """The settings; ends the process with what is wrong with them."""
    from proxy.features.settings import AllSettings
    from proxy.settings import SettingsError, load

    try:
        return load(config, overrides, os.environ, AllSettings)
    except SettingsError as error:
        _complain(error)
        raise typer.Exit(REFUSED) from error


def _complain(error: SettingsError) -> None:
    for problem in error.problems:
        typer.echo(str(problem), err=True)
    count = len(error.problems)
    typer.echo(f"{count} problem{'s' if count != 1 else ''}.", err=True)


HEALTH_SECONDS = 3.0
"""How long the proxy has to answer."""


def configured_address(environ: Mapping[str, str]) -> str:
    """Where the proxy that *environ* configures is asked."""
    host = environ.get("ULLAGE_SERVER__HOST", "127.0.0.1")
    # What listens everywhere is asked on this machine's own address.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://{f'[{host}]' if ':' in host else host}:{environ.get('ULLAGE_SERVER__PORT', '8484')}"


def readiness_status(address: str) -> int:
    """The status of its readiness route. Raises ``ValueError`` for no URL, ``OSError``, ``HTTPException``."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("give scheme and host, such as http://127.0.0.1:8484")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=HEALTH_SECONDS)
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/health/ready")
        return connection.getresponse().status
    finally:
        connection.close()
