"""A configuration that is read again while the proxy runs: when the file changed, or on SIGUSR1.

Theory of operation
===================

``ConfigWatch`` looks at the file every two seconds and waits for SIGUSR1. After either, ``ConfigSource.read`` reads
file, environment and flags again, and checks them as ``ullage check`` does. It compares three sets of settings: those
that the process *started* with, those *accepted* last, and those that it has just read:

    the settings read                     settings to change to        the state afterwards
    ------------------------------------  ---------------------------  -------------------------------------------------
    are refused                           none                         ``problems``; all else as before
    are those accepted last               none                         no ``problems``
    differ in keys of ``RESTART`` only    none                         ``needs_restart``
    differ in others, too                 the new ones, but those of   the next ``generation``, ``changed`` and
                                          ``RESTART`` as started       ``needs_restart``

``needs_restart`` names the keys of ``RESTART`` whose value differs from the one that the process started with. Keys are
named, never values: they may be secrets.

The caller applies a ``Loaded``. A lone process builds new parts beside the old ones and puts them in their place
(``app.Reloads``): requests under way end with the old ones. The parent of several workers sends it to them
(``fleet``). If the parts cannot be built, the old ones stay, and the fault is logged.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from proxy.features.settings import AllSettings
from proxy.settings import Overrides, Problem, Settings, SettingsError, load, serving_problem
from proxy.telemetry.logs import Logs

WATCH_SECONDS: Final = 2.0
"""Seconds between two looks at the file: one system call each."""

RESTART: Final = ("server.host", "server.port", "server.workers", "server.limits", "store", "telemetry")
"""Settings whose value at the start of the process is used to its end."""


@dataclass(frozen=True, slots=True)
class ConfigState:
    """The configuration in force, for the status: its ``generation`` counts from 1, ``loaded_at`` is Unix time.

    ``changed`` are the keys of the last change, ``needs_restart`` those that the file has changed since the start
    without effect. ``problems`` say why a newer file was refused; the configuration before it stays in force.
    """

    file: str = ""
    generation: int = 1
    loaded_at: float = 0.0
    changed: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def status(self) -> dict[str, object]:
        """Return the state as the operator's status shows it."""
        return {
            "file": self.file or None,
            "generation": self.generation,
            "age_seconds": round(max(0.0, time.time() - self.loaded_at), 1),
            "changed": list(self.changed),
            "needs_restart": list(self.needs_restart),
            "problems": list(self.problems),
        }


STARTED: Final = ConfigState()
"""The state of a configuration that is never read again."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings to change to, and the state with them. ``settings`` is None if nothing changes."""

    state: ConfigState
    settings: Settings | None = None
    problems: tuple[Problem, ...] = ()


class ConfigSource:
    """The file, flags and environment that the settings come from; *settings* are those in force."""

    def __init__(self, path: Path | None, overrides: Overrides, settings: Settings) -> None:
        self.state = ConfigState(str(path or ""), loaded_at=time.time())
        self._path = path
        self._overrides = overrides
        self._started = settings
        self._accepted = settings
        self._signature = self._sign()

    def has_changed(self) -> bool:
        """True if the file is another one than at the last call."""
        before, self._signature = self._signature, self._sign()
        return self._signature != before

    def read(self) -> Loaded:
        """Read the settings again. If they are refused, nothing changes but the state's ``problems``."""
        try:
            wanted = self._load()
        except SettingsError as error:
            self.state = replace(self.state, problems=tuple(str(problem) for problem in error.problems))
            return Loaded(self.state, None, tuple(error.problems))
        changed = [key for key in changed_keys(self._accepted, wanted) if not needs_restart(key)]
        waiting = [key for key in changed_keys(self._started, wanted) if needs_restart(key)]
        self._accepted = wanted
        self.state = replace(self.state, needs_restart=tuple(waiting), problems=())
        if not changed:
            return Loaded(self.state)
        generation = self.state.generation + 1
        self.state = replace(self.state, generation=generation, loaded_at=time.time(), changed=tuple(changed))
        return Loaded(self.state, with_fixed(wanted, self._started))

    def _load(self) -> Settings:
        """Read the settings. Raises ``SettingsError`` if ``ullage check`` would refuse them, or for a pipe."""
        if self._path is not None and self._path.exists() and not self._path.is_file():
            remedy = "Start again, or put a file in its place."
            problem = "is no regular file and cannot be read again"
            raise SettingsError([Problem(str(self._path), None, "", problem, remedy)])
        settings = load(self._path, self._overrides, os.environ, AllSettings)
        reason = serving_problem(settings)
        if reason is not None:
            source = str(self._path or "the command line")
            raise SettingsError([Problem(source, None, "", f"would not be served: {reason}", "")])
        return settings

    def _sign(self) -> tuple[int, int, int] | None:
        """Return inode, time and size of the file, which differ between its versions; None if there is none.

        A pipe (``--config <(command)``) is none: it is read once, and reading it again may never end.

        A mounted ConfigMap is a link that is replaced, so that its file has another inode:
        https://kubernetes.io/docs/concepts/configuration/configmap/#mounted-configmaps-are-updated-automatically
        """
        if self._path is None:
            return None
        try:
            status = self._path.stat()
        except OSError:
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size


def needs_restart(key: str) -> bool:
    """True if a change of the setting *key* has no effect in a running process."""
    return any(key == fixed or key.startswith(f"{fixed}.") for fixed in RESTART)


def changed_keys(before: Settings, after: Settings) -> list[str]:
    """Return the names of the settings that differ, sorted; a list is one of them."""
    return sorted(_differences("", before.model_dump(), after.model_dump()))


def _differences(path: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for name in before.keys() | after.keys():
        old, new, key = before.get(name), after.get(name), f"{path}{name}"
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(f"{key}.", old, new)
        elif old != new:
            yield key


def with_fixed(wanted: Settings, started: Settings) -> Settings:
    """Return the *wanted* settings, with the *started* process's values of those that need a restart."""
    server = {name.partition(".")[2] for name in RESTART if name.startswith("server.")}
    fixed = {name: getattr(started.server, name) for name in server}
    return wanted.model_copy(
        update={
            "server": wanted.server.model_copy(update=fixed),
            "store": started.store,
            "telemetry": started.telemetry,
        }
    )


def log_configuration(logs: Logs, loaded: Loaded) -> None:
    """Log the result of reading the configuration again: refused, changed, or waiting for a restart."""
    state = loaded.state
    for problem in loaded.problems:
        facts = {"file": problem.file, "line": problem.line, "key": problem.key, "problem": problem.message}
        logs.log.error("config.refused", **facts, remedy=problem.remedy)
    if loaded.settings is not None:
        logs.log.info("config.changed", generation=state.generation, changed=state.changed)
    if state.needs_restart and not loaded.problems:
        logs.log.warning("config.needs_restart", changed=state.needs_restart)


@dataclass
class CurrentState:
    """The state of the configuration as a process shows it."""

    state: ConfigState


@dataclass
class ConfigWatch:
    """Reads the configuration again if its file changes, or on a signal."""

    source: ConfigSource
    requested: asyncio.Event = field(default_factory=asyncio.Event)

    def handle_signal(self) -> None:
        """Handle SIGUSR1 until the running loop is closed. SIGHUP drains: a terminal that is closed sends it."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.requested.set)

    async def run(self, apply: Callable[[Loaded], Any]) -> None:
        """Read the configuration after each change and each signal, and call *apply* with it. Never returns."""
        while True:
            try:
                await asyncio.wait_for(self.requested.wait(), WATCH_SECONDS)
            except TimeoutError:
                if not self.source.has_changed():
                    continue
            self.requested.clear()
            # Remembers the file as it is now: a change that a signal announced would be read again at the next look.
            self.source.has_changed()
            await apply(await asyncio.to_thread(self.source.read))
