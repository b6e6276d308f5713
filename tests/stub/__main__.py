"""Runs the strict upstream as a program: ``python -m tests.stub --port 9900 --window 8192``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal

from tests.stub.rules import Rules
from tests.stub.server import Stub
from tests.stub.tokens import encoding


def main() -> None:
    """Serve until interrupted, with one line for each request on standard output."""
    parser = argparse.ArgumentParser(prog="python -m tests.stub", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9900, help="0 takes a free one")
    parser.add_argument("--window", type=int, default=8192, help="tokens")
    parser.add_argument("--max-tokens", type=int, default=16, help="reserved for a request that names no figure")
    parser.add_argument("--wording", choices=("openai", "anthropic", "vllm", "llamacpp"), default="openai")
    parser.add_argument("--in-stream", action="store_true", help="report an overflow inside a 200 stream")
    parser.add_argument("--factor", type=float, default=1.0, help="tokens for each token of o200k_base")
    parser.add_argument("--alternation", action="store_true", help="demand user and assistant in turn")
    parser.add_argument("--one-system", action="store_true", help="demand a single leading system message")
    given = parser.parse_args()
    rules = Rules(
        window=given.window,
        default_max_tokens=given.max_tokens,
        wording=given.wording,
        overflow_in_stream=given.in_stream,
        factor=given.factor,
        alternation=given.alternation,
        one_leading_system=given.one_system,
    )
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(Stub(rules, host=given.host, port=given.port)))


async def _serve(stub: Stub) -> None:
    encoding()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with stub:
        print(f"strict upstream on {stub.url}, window {stub.rules.window} tokens", flush=True)
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), 0.5)
            for seen in stub.seen:
                print(f"{seen.method} {seen.path} {seen.verdict} tokens={seen.tokens} cached={seen.cached}", flush=True)
            stub.forget()


if __name__ == "__main__":
    main()
