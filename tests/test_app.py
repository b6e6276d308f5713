"""The life of a process, from its start to its exit code."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from proxy.app import Companion, serve
from proxy.process import StartOptions
from proxy.settings import Settings
from proxy.workers import Worker
from tests.support.loopback import loopback_client
from tests.support.ports import free_port

ONE = Worker(0, 1)


def options(port: int) -> StartOptions:
    """Those of a process with a store in memory."""
    upstream = {"name": "up", "base_url": "http://127.0.0.1:9/v1", "probe": False}
    return StartOptions(
        Settings.model_validate({"server": {"port": port}, "store": {"url": "memory"}, "upstreams": [upstream]})
    )


async def test_it_serves_for_as_long_as_its_companion_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The companion gets the port, its exit code is the process's, the log goes where it says, and nothing is left."""
    port = free_port()
    log = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY)

    async def run(given: int) -> int:
        async with loopback_client() as client:
            assert (await client.get(f"http://127.0.0.1:{given}/health/ready")).status_code == 200
        assert given == port
        return 7

    try:
        assert await serve(options(port), ONE, Companion(run, log)) == 7
    finally:
        os.close(log)
    assert capfd.readouterr() == ("", "")
    async with loopback_client() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"http://127.0.0.1:{port}/health/ready")


async def test_a_start_that_fails_is_said_and_ends_with_one(capfd: pytest.CaptureFixture[str]) -> None:
    """A companion is not run beside a proxy that cannot listen."""
    port = free_port()

    async def nested(_: int) -> int:
        return await serve(options(port), ONE, Companion(never, 1))

    async def never(_: int) -> int:
        raise AssertionError("it was run")

    assert await serve(options(port), ONE, Companion(nested, 1)) == 1
    assert f"127.0.0.1:{port}: address already in use" in capfd.readouterr().err
