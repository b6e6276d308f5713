"""Fixtures that every test may use: strict upstreams and real proxies, ended when the test ends."""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, settings

import proxy as package
from tests.stub import Answer, Rules, Stub
from tests.support.proxy_process import Proxy
from tests.support.shared_recordings import missing

# The same examples on every run: a suite that is green once stays so. HYPOTHESIS_PROFILE=search looks for new ones.
settings.register_profile("same", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# What a test compiles, the processes that it starts need not compile again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

CLEANED_UP_WITHIN = 120.0
"""Seconds that a test that was stopped after its time has for its fixtures to end what they started."""

FAILED = pytest.StashKey[bool]()
LOG_TAIL = 6000


class StartProxy(Protocol):
    """Starts a proxy in front of *upstream* and returns it ready."""

    async def __call__(
        self,
        upstream: str,
        *,
        window: int | None = None,
        config: Mapping[str, Any] | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        port: int = 0,
        home: Path | None = None,
        under: Sequence[str] = (),
        fast: bool = False,
    ) -> Proxy: ...


StartStub = Callable[..., Awaitable[Stub]]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember a failed call, so that the proxy's log can be shown beside it."""
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """Abort the process when a test goes on although pytest-timeout stopped it: pytest-xdist starts another worker.

    An exception, which is how a test is stopped, may end up in a task that nobody awaits, and fixtures may wait for
    what never comes. Python's fault handler tells where every thread was.
    """
    marker = item.get_closest_marker("timeout")
    seconds = float(marker.args[0] if marker else item.config.getini("timeout"))
    last_resort = threading.Timer(seconds + CLEANED_UP_WITHIN, os.abort)
    last_resort.daemon = True
    last_resort.start()
    try:
        return (yield)
    finally:
        last_resort.cancel()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let no garbage collection visit what is collected: a million objects that live until the end.

    While they are made, such visits are two of thirteen seconds of CPU; later each takes a third of one.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Import every module before a property is tested, so that its examples depend on no test that ran before.

    Hypothesis takes some of them from the constants of the modules that are loaded:
    https://github.com/HypothesisWorks/hypothesis/blob/master/hypothesis-python/src/hypothesis/internal/constants_ast.py
    """
    if not any(item.get_closest_marker("hypothesis") for item in items):
        return
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs recordings that are not at hand."""
    reasons = [missing(name) for marker in item.iter_markers("shared") for name in marker.args]
    if any(reasons):
        pytest.skip("; ".join(filter(None, reasons)))


@pytest.fixture
async def stub() -> AsyncIterator[StartStub]:
    """Starts strict upstreams: ``await stub(window=8192, wording="vllm", …)`` takes the fields of ``Rules``."""
    async with AsyncExitStack() as stack:

        async def start(**rules: Any) -> Stub:
            return await stack.enter_async_context(Stub(Rules(**rules)))

        yield start


@pytest.fixture
async def proxy(request: pytest.FixtureRequest) -> AsyncIterator[StartProxy]:
    """Starts real proxy processes: ``await proxy(stub.url, window=8192)``; their logs are shown if the test fails."""
    started: list[Proxy] = []
    async with AsyncExitStack() as stack:

        async def start(
            upstream: str,
            *,
            window: int | None = None,
            config: Mapping[str, Any] | None = None,
            arguments: Sequence[str] = (),
            environment: Mapping[str, str] | None = None,
            port: int = 0,
            home: Path | None = None,
            under: Sequence[str] = (),
            fast: bool = False,
        ) -> Proxy:
            process = Proxy(upstream, window, config, arguments, environment or {}, port, home, under=under, fast=fast)
            started.append(await stack.enter_async_context(process))
            return process

        yield start
        if request.node.stash.get(FAILED, True):
            for process in started:
                print(f"--- log of the proxy on {process.url} ---")
                print(process.log.read_text(errors="replace")[-LOG_TAIL:])


@pytest.fixture
async def start_recall(stub: StartStub, tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[tuple[Stub, Any]]]]:
    """Starts an upstream whose model gives the answers, and a proxy in this process, with recall on, in front of it."""
    from tests.support import recall_fixtures, server_tool_fixtures  # not above: the feature may be deleted

    async with AsyncExitStack() as stack:

        async def start(api: str, *answers: Answer, **options: Any) -> tuple[Stub, Any]:
            server = await stub(window=recall_fixtures.WINDOW, wording=server_tool_fixtures.WORDING[api])
            server.script = server_tool_fixtures.model_answering(*answers)
            return server, await stack.enter_async_context(
                recall_fixtures.recall_in_process(server, tmp_path, **options)
            )

        yield start
