"""What is measured side by side: the canned upstream itself, the relay, a real ``ullage serve``, and neighbours.

A neighbour is another proxy in a virtual environment of its own, in a folder that the caller names. It is no dependency
of this project; those that are not there are left out.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.bench.bodies import WINDOWS
from tests.bench.cpu import family
from tests.bench.load import loaded
from tests.bench.programs import command, listening, program
from tests.support.ports import free_port
from tests.support.proxy_process import Proxy

SLOWEST_START = 120.0
"""Seconds until a neighbour listens; one that imports a great deal takes half a minute."""

NEIGHBOUR_REQUESTS = 6
"""Requests of a connection in a neighbour's slice: some take forty milliseconds for each."""


@dataclass(frozen=True)
class Subject:
    """Something that answers on *port*; *pids* are its processes, *most* the requests of a connection in one slice."""

    name: str
    port: int
    pids: list[int]
    most: int = 10_000


@dataclass(frozen=True)
class Start:
    """How a neighbour is started: its *words* behind the environment's ``bin`` folder, and its *environment*."""

    words: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)


def configuration(upstream: str, windows: Mapping[str, int], **sections: Any) -> dict[str, Any]:
    """Ullage's configuration for the bench: everything is on.

    Summaries may cost what they take, all at once, so that they are written as soon as a session is warm.
    """
    models = [{"name": name, "context_window": size, "tokenizer": "o200k_base"} for name, size in windows.items()]
    return {
        "upstreams": [{"name": "mock", "base_url": f"{upstream}/v1"}],
        "models": models,
        "summaries": {"spend": 1.0, "jobs": 32},
        **sections,
    }


@asynccontextmanager
async def relay(upstream: str) -> AsyncIterator[Subject]:
    """The relay of forty lines."""
    port = free_port()
    async with program("tests.bench.relay", str(port), upstream) as process:
        await listening(port)
        yield Subject("relay", port, [process.pid])


@asynccontextmanager
async def ullage(
    upstream: str, windows: Mapping[str, int] = WINDOWS, workers: int = 1, **sections: Any
) -> AsyncIterator[Subject]:
    """A real ``ullage serve``, of which background loading is over."""
    config = configuration(upstream, windows, **sections)
    async with Proxy(f"{upstream}/v1", config=config, arguments=["--workers", str(workers)]) as proxy:
        subject = Subject("ullage", proxy.port, family(proxy.pid))
        await loaded(subject.port, subject.pids)
        yield subject


@asynccontextmanager
async def subjects(upstream_pid: int, upstream_port: int, neighbours: Path | None) -> AsyncIterator[list[Subject]]:
    """All subjects of the comparison, upstream first, running."""
    upstream = f"http://127.0.0.1:{upstream_port}"
    async with AsyncExitStack() as stack:
        found = [Subject("direct", upstream_port, [upstream_pid])]
        found.append(await stack.enter_async_context(relay(upstream)))
        found.append(await stack.enter_async_context(ullage(upstream)))
        if neighbours:
            found += await started(stack, upstream, neighbours)
        yield found


async def started(stack: AsyncExitStack, upstream: str, folder: Path) -> list[Subject]:
    """The neighbours that are installed in *folder* and start, until *stack* is closed."""
    running = []
    for name, start_of in NEIGHBOURS.items():
        if not (folder / name / "bin").is_dir():
            print(f"{name}: not installed in {folder}", file=sys.stderr)
            continue
        home, port = folder / name / "home", free_port()
        home.mkdir(exist_ok=True)
        start = start_of(port, upstream, home)
        environment = {**os.environ, "HOME": str(home), **start.environment}
        words = [str(folder / name / "bin" / start.words[0]), *start.words[1:]]
        began = time.monotonic()
        log = f"exec {' '.join(words)} > {home}/log 2>&1"
        process = await stack.enter_async_context(command("sh", "-c", log, environment=environment))
        try:
            await listening(port, SLOWEST_START)
        except TimeoutError:
            print(f"{name}: does not listen; see {home}/log", file=sys.stderr)
            continue
        print(f"{name}: up after {time.monotonic() - began:.1f} s", file=sys.stderr)
        running.append(Subject(name, port, family(process.pid), NEIGHBOUR_REQUESTS))
    return running


def _litellm(port: int, upstream: str, home: Path) -> Start:
    models = [
        {
            "model_name": name,
            "litellm_params": {"model": f"openai/{name}", "api_base": f"{upstream}/v1", "api_key": "k"},
        }
        for name in WINDOWS
    ]
    file = home / "config.yaml"
    file.write_text(yaml.safe_dump({"model_list": models, "litellm_settings": {"telemetry": False}}))
    words = ["litellm", "--config", str(file), "--port", str(port), "--host", "127.0.0.1", "--num_workers", "1"]
    environment = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }
    return Start(words, environment)


def _headroom(port: int, upstream: str, home: Path) -> Start:
    words = ["headroom", "proxy", "--port", str(port), "--openai-api-url", upstream, "--rpm", "100000000"]
    words += ["--no-rate-limit", "--no-cache", "--no-subscription-tracking", "--no-http2"]
    return Start(words, {"HEADROOM_TELEMETRY": "off", "HF_HUB_OFFLINE": "1", "HEADROOM_STATELESS": "1"})


def _awecompress(port: int, upstream: str, home: Path) -> Start:
    file = home / "config.json"
    settings = {"port": port, "upstream": upstream, "thresholdTokens": 60_000, "dbPath": f"{home}/{port}.db"}
    file.write_text(json.dumps(settings))
    return Start(["awecompress", "serve", "--config", str(file), "--port", str(port)])


def _ctxkeeper(port: int, upstream: str, home: Path) -> Start:
    words = ["ctxkeeper", "--upstream", upstream, "--port", str(port), "--budget", "32768"]
    return Start([*words, "--state-dir", f"{home}/state-{port}"])


def _context_guardian(port: int, upstream: str, home: Path) -> Start:
    environment = {
        "GUARDIAN_PORT": str(port),
        "GUARDIAN_UPSTREAM_URL": f"{upstream}/v1",
        "GUARDIAN_NUM_CTX": "32768",
        "GUARDIAN_VERBOSE": "0",
        "GUARDIAN_DETECT_CONTEXT": "off",
        "GUARDIAN_OLLAMA_CONTEXT": "off",
    }
    return Start(["context-guardian"], environment)


NEIGHBOURS: Mapping[str, Callable[[int, str, Path], Start]] = {
    "litellm": _litellm,
    "headroom": _headroom,
    "awecompress": _awecompress,
    "ctxkeeper": _ctxkeeper,
    "context-guardian": _context_guardian,
}
"""How each neighbour is started, by the name of its folder."""
