"""``ullage run``: a proxy and a client that end together. Nothing of the client's own configuration is written."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from proxy.cli.options import MISUSED, ConfigOption, ModelOption, Overrides, fail, overrides_of, settings_of

if TYPE_CHECKING:
    from proxy.cli.clients import Client, ClientFacts
    from proxy.settings import Settings

# Exit codes as shells have them: https://pubs.opengroup.org/onlinepubs/9799919799/utilities/V3_chap02.html#tag_19_08_02

NOT_STARTED: Final = 126
"""The exit code of a command that exists and cannot be started."""

NOT_FOUND: Final = 127
"""The exit code of a command that does not exist."""

BY_SIGNAL: Final = 128
"""Added to the number of the signal that ended a command."""

END_OF_OPTIONS: Final = "--"
"""The separator that may stand between a client and its arguments. Any other command gets it as its own argument."""

COMMON_CLIENTS: Final = ("openai", "anthropic", "litellm")
"""The clients whose variables any command gets."""

OPENAI: Final = "https://api.openai.com/v1"
ANTHROPIC: Final = "https://api.anthropic.com/v1"
GOOGLE: Final = "https://generativelanguage.googleapis.com"
"""The upstreams of clients of each API: https://platform.openai.com/docs/api-reference, https://docs.anthropic.com/en/api."""

PASSED_ON: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are passed on to the client, because ``ullage run`` stands for it in scripts and process lists."""

PR_SET_PDEATHSIG: Final = 1
"""The number of the call that has the kernel signal a process when its parent ends.

https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html
"""

FROM_TERMINAL: Final = frozenset({signal.SIGINT, signal.SIGQUIT})
"""Signals that a terminal sends to every process in its foreground, so that the client has them already."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A command, and the variables that are added to its environment."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


def run(
    words: Annotated[
        list[str], typer.Argument(help="A client of `ullage connect`, or any command; its arguments.", metavar="CLIENT")
    ],
    upstream: Annotated[
        str | None, typer.Option(help="The upstream [default: the client's own provider].", metavar="URL")
    ] = None,
    config: ConfigOption = None,
    model: ModelOption = None,
    window: Annotated[int | None, typer.Option(help="Its window in tokens [default: the known one].", min=1)] = None,
    store: Annotated[
        str | None, typer.Option(help="embedded, memory or a redis:// URL [default: memory].", metavar="URL")
    ] = None,
    log: Annotated[Path, typer.Option(help="Append log lines to this file.", metavar="FILE")] = Path(os.devnull),
) -> None:
    """Start a proxy on a free port and a client that uses it.

    Nothing is written to the client's files, and both end together, with the client's exit code. Options come before
    CLIENT; words after it are the client's own: `ullage run --model gpt-5 codex -- exec "..."`. Any other command gets
    OPENAI_BASE_URL, OPENAI_API_BASE and ANTHROPIC_BASE_URL.
    """
    from proxy.cli.clients import clients

    by_name = clients()
    client = client_of(words[0], by_name)
    if client is not None and client.needs_model and model is None:
        fail(MISUSED, f"The configuration of {client.title} names models: give --model NAME before it.")
    arguments = _arguments(client, words)
    settings = _settings(config, upstream, model, window, store, client)
    from proxy.cli.models import client_facts

    key = ""
    if client is not None:
        key = client.key
    facts = client_facts(settings, key, model, window)

    def launch(root: str) -> Launch:
        return launch_of(client, facts.at(root), arguments, [by_name[name] for name in COMMON_CLIENTS])

    raise typer.Exit(_serve(settings, launch, log))


def _arguments(client: Client | None, words: Sequence[str]) -> list[str]:
    """Return the command and its arguments; end the process if there is no such command."""
    arguments = list(words)
    if client is not None:
        arguments = list(words[1:])
        if arguments[:1] == [END_OF_OPTIONS]:
            del arguments[0]
        if client.run is not None:
            arguments.insert(0, client.run.command)
        elif not client.environment:
            if not client.files:
                fail(
                    MISUSED,
                    f"{client.title} takes neither variables nor options: `ullage connect {words[0]}` says how.",
                )
            fail(
                MISUSED, f"{client.title} reads its configuration from files only: `ullage connect {words[0]} --write`."
            )
    if not arguments:
        fail(MISUSED, "Give the command to run: ullage run openai -- python agent.py")
    if shutil.which(arguments[0]) is None:
        fail(NOT_FOUND, f"{arguments[0]} is no command on the PATH.")
    return arguments


def client_of(word: str, by_name: Mapping[str, Client]) -> Client | None:
    """Return the client whose name or program is *word*; None if it is any other command."""
    for name, client in by_name.items():
        if word == name or (client.run is not None and word == client.run.command):
            return client
    return None


def _settings(
    config: Path | None,
    upstream: str | None,
    model: str | None,
    window: int | None,
    store: str | None,
    client: Client | None,
) -> Settings:
    """Return the proxy's settings: the configured ones, or the client's own provider; on a free port of this machine.

    Records stay in memory, unless the file or *store* says otherwise.
    """
    overrides = overrides_of(upstream, window, model or "*")
    overrides["server", "host"], overrides["server", "port"], overrides["server", "workers"] = "127.0.0.1", 0, 1
    if store is not None:
        overrides["store", "url"] = store
    elif config is None and "ULLAGE_STORE__URL" not in os.environ:
        overrides["store", "url"] = "memory"
    settings = settings_of(config, overrides)
    if settings.upstreams:
        return settings
    return settings_of(config, overrides | providers(client, window, os.environ))


def providers(client: Client | None, window: int | None, environ: Mapping[str, str]) -> Overrides:
    """Return the upstreams of *client*, or of any command: the addresses in its variables, or its providers."""
    openai = {"name": "openai", "base_url": environ.get("OPENAI_BASE_URL") or OPENAI}
    anthropic = {"name": "anthropic", "base_url": environ.get("ANTHROPIC_BASE_URL") or ANTHROPIC}
    google = {"name": "google", "base_url": environ.get("GOOGLE_GEMINI_BASE_URL") or GOOGLE}
    only = {"messages": anthropic, "gemini": google}
    if client is not None and client.api in only:
        return {("upstreams",): [only[client.api]]}
    overrides: Overrides = {("upstreams",): [openai]}
    if client is None or "messages" in client.api:
        rules: list[dict[str, object]] = [
            {"name": "claude*", "upstream": "anthropic"},
            {"name": "*", "upstream": "openai"},
        ]
        if window is not None:
            rules = [{**rule, "context_window": window} for rule in rules]
        overrides = {("upstreams",): [openai, anthropic], ("models",): rules}
    return overrides


def launch_of(client: Client | None, facts: ClientFacts, arguments: Sequence[str], usual: Sequence[Client]) -> Launch:
    """Return the command with its variables; *usual* are the clients whose variables any command gets."""
    from proxy.cli.clients import fill_in

    if client is None:
        variables: dict[str, str] = {}
        for usual_client in usual:
            variables |= usual_client.environment
        return Launch(tuple(arguments), _texts(fill_in(variables, facts)))
    if client.run is None:
        return Launch(tuple(arguments), _texts(fill_in(client.environment, facts)))
    options = [fill_in(list(group), facts) for group in client.run.arguments]
    words: list[str] = []
    for option, group in zip(options, client.run.arguments, strict=True):
        if len(option) == len(group):
            words += map(str, option)
    environment = {**_file_variables(client, facts), **_texts(fill_in(client.run.environment, facts))}
    return Launch((arguments[0], *words, *arguments[1:]), environment)


def _texts(values: Mapping[str, object] | None) -> dict[str, str]:
    return {name: str(value) for name, value in (values or {}).items()}


def _file_variables(client: Client, facts: ClientFacts) -> dict[str, str]:
    """Return the settings of the files of *client* that it also reads from variables."""
    from proxy.cli.clients import filled_settings
    from proxy.cli.connect import client_files, render

    assert client.run is not None
    variables: dict[str, str] = {}
    for file in client.files:
        for setting in filled_settings(file, facts):
            name = setting.at[-1]
            if isinstance(name, str) and name.isupper():
                variables[name] = str(setting.value)
    if client.run.document:
        first, *_ = client_files(client, facts, {})
        variables[client.run.document] = render(first)
    return variables


def environment_of(launch: Launch, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the command: *environ*, its own variables, and no HTTP proxy before Ullage."""
    bypass = ",".join(filter(None, [environ.get("NO_PROXY") or environ.get("no_proxy"), "127.0.0.1"]))
    return {**environ, "NO_PROXY": bypass, "no_proxy": bypass, **launch.environment}


def _serve(settings: Settings, launch: Callable[[str], Launch], log: Path) -> int:
    """Serve while the command runs; return its exit code."""
    from proxy.app import Companion
    from proxy.fleet import run_with

    async def run_command(port: int) -> int:
        launched = launch(f"http://127.0.0.1:{port}")
        return await run_child(launched.command, environment_of(launched, os.environ))

    try:
        fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError as error:
        fail(MISUSED, f"{log}: cannot be written: {error.strerror}.")
    try:
        return run_with(settings, Companion(run_command, fd))
    finally:
        os.close(fd)


async def run_child(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run *command* to its end, pass signals on to it, and return its exit code; ``NOT_STARTED`` if it has none."""
    early: list[signal.Signals] = []  # arrived before the child existed
    child: asyncio.subprocess.Process | None = None

    def forward(number: signal.Signals) -> None:
        if child is None:
            early.append(number)
        elif child.returncode is None and not (number in FROM_TERMINAL and _in_foreground()):
            child.send_signal(number)

    loop = asyncio.get_running_loop()
    for number in PASSED_ON:
        loop.add_signal_handler(number, forward, number)
    try:
        child = await asyncio.create_subprocess_exec(*command, env=dict(environment), preexec_fn=_end_with_parent())
    except OSError as error:  # for example a script whose interpreter is gone
        typer.echo(f"{command[0]} cannot be started: {error.strerror}.", err=True)
        return NOT_STARTED
    for number in early:
        forward(number)
    code = await child.wait()
    if code < 0:
        return BY_SIGNAL - code
    return code


def _end_with_parent() -> Callable[[], None] | None:
    """Return what a child calls before its program runs, to end if this process is killed; None if nothing can.

    On Linux the kernel sends it SIGTERM then. Elsewhere a client outlives a proxy that had no time to end it, and gets
    connection errors.
    """
    if not sys.platform.startswith("linux"):
        return None
    # Loaded here: between fork and exec little is safe, since other threads may have held locks.
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    return ask


def _in_foreground() -> bool:
    """True if Ctrl-C in the terminal sends its signal to this process and to its children alike.

    https://man7.org/linux/man-pages/man3/tcgetpgrp.3.html
    """
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
