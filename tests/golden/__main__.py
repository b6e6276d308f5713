"""Record what real proxy processes do with every case, or compare it with an earlier record.

    python -m tests.golden record FILE.jsonl.gz [--only SETUP ...]
    python -m tests.golden compare FILE.jsonl.gz [--only SETUP ...] [--show N]

For each request: the status and a digest of the answer, what reached the upstream (path, model, digest of the body,
whether a key came with it), the ``x-ullage-`` response headers and the log line without times. Identical code gives an
identical record on every machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import hashlib
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.golden.cases import Case, Setup, models, setups, true_windows
from tests.store.conftest import Valkey
from tests.stub import Rules, Seen, Stub
from tests.stub.answers import Answer, Call
from tests.support.proxy_process import Proxy

TIMES = frozenset({"request_id", "overhead_ms", "duration_ms", "timestamp", "event", "level", "cached_tokens"})
KEY = "golden-record-key-0123456789abcdef"
Row = dict[str, Any]


def digest(data: bytes) -> str:
    """A short name for *data*."""
    return hashlib.sha256(data).hexdigest()[:16]


def recalling(seen: Seen) -> Answer:
    """Look something up where the tool is offered and was not used yet, else answer."""
    if "ullage_recall" in seen.tools and b"ledger invoice error" not in seen.body:
        return Answer("", (Call("ullage_recall", '{"query":"ledger invoice error"}'),))
    return Answer()


class Log:
    """The request lines of a running proxy's log, one after another."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    async def next(self) -> Row:
        """The next request's line, without times."""
        async with asyncio.timeout(60):
            while True:
                with self._path.open("rb") as log:
                    log.seek(self._at)
                    lines = log.readlines()
                for line in lines:
                    if not line.endswith(b"\n"):
                        break
                    self._at += len(line)
                    if b'"proxy.request_done"' in line:
                        return {k: v for k, v in json.loads(line).items() if k not in TIMES}
                await asyncio.sleep(0.001)


@asynccontextmanager
async def running(setup: Setup) -> AsyncIterator[tuple[Stub, list[Proxy], list[Log]]]:
    """The upstream and the proxies of *setup*."""
    async with AsyncExitStack() as stack:
        stub = await stack.enter_async_context(Stub(Rules(window=200_000, windows=true_windows(), counts=True)))
        if setup.recalls:
            stub.script = recalling
        store: Row = {"url": "memory", "key": KEY}
        if setup.replicas > 1:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ulg-")))
            server = Valkey(folder)
            server.start()
            stack.callback(server.kill)
            store["url"] = server.url
        config = {"store": store, "models": models(), "summaries": {"mode": "off"}, **setup.config}
        upstream = {"name": "stub", "base_url": stub.url, "probe": False}
        config["upstreams"] = [{**upstream, **setup.config.get("upstreams", {})}]
        proxies = [await stack.enter_async_context(Proxy(stub.url, config=config)) for _ in range(setup.replicas)]
        yield stub, proxies, [Log(proxy.log) for proxy in proxies]


async def record(setup: Setup) -> AsyncIterator[Row]:
    """What happens to each case of *setup*."""
    async with running(setup) as (stub, proxies, logs), httpx.AsyncClient(trust_env=False, timeout=120) as client:
        for case in setup.cases:
            stub.forget()
            url = proxies[case.replica].root + case.path
            reply = await client.post(url, content=case.body, headers={**_headers(case), **case.headers})
            line = await logs[case.replica].next()
            yield {
                "case": f"{setup.name}:{case.name}",
                "status": reply.status_code,
                "answer": digest(reply.content) if reply.status_code != 200 else "",
                "sent": [
                    [seen.path, seen.model, digest(seen.body), bool(seen.header("authorization"))] for seen in stub.seen
                ],
                "headers": {k: v for k, v in sorted(reply.headers.items()) if k.startswith("x-ullage-")},
                "report": line,
            }


def _headers(case: Case) -> Mapping[str, str]:
    return {
        "content-type": "application/json",
        # A key for each conversation: what one taught of a model changes no other, in whatever order they run.
        "authorization": f"Bearer sk-{digest(case.name.rsplit('/', 1)[0].encode())}",
        "anthropic-version": "2023-06-01",
        "user-agent": "golden",
    }


def rows_of(path: Path) -> dict[str, Row]:
    """The rows of a record by their case."""
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    return {row["case"]: row for row in rows}


def differences(was: Row, now: Row) -> list[str]:
    """What differs between two rows of one case, a line each."""
    found = [f"{key}: {was[key]!r} -> {now[key]!r}" for key in ("status", "answer", "sent") if was[key] != now[key]]
    for part in ("headers", "report"):
        keys = sorted(was[part].keys() | now[part].keys())
        changed = [key for key in keys if was[part].get(key) != now[part].get(key)]
        found += [f"{part}.{key}: {was[part].get(key)!r} -> {now[part].get(key)!r}" for key in changed]
    return found


async def run(wanted: Sequence[Setup], sample: int) -> list[Row]:
    """The rows of every case of *wanted*; of each setup only every *sample*-th conversation."""
    rows: list[Row] = []
    for setup in wanted:
        chosen = _sampled(setup, sample)
        rows += [row async for row in record(chosen)]
        print(f"{setup.name}: {len(chosen.cases)} requests", file=sys.stderr, flush=True)
    return rows


def _sampled(setup: Setup, sample: int) -> Setup:
    if sample == 1:
        return setup
    names = sorted({case.name.rsplit("/", 1)[0] for case in setup.cases})
    chosen = set(random.Random(setup.name).sample(names, max(1, len(names) // sample)))
    cases = [case for case in setup.cases if case.name.rsplit("/", 1)[0] in chosen]
    return Setup(setup.name, setup.config, cases, setup.replicas, setup.recalls)


def main() -> int:
    """Record or compare; 1 if anything differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("how", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--sample", type=int, default=1, help="only every n-th conversation of each setup")
    parser.add_argument("--show", type=int, default=12)
    args = parser.parse_args()
    wanted = [setup for setup in setups() if not args.only or setup.name in args.only]
    rows = asyncio.run(run(wanted, args.sample))
    if args.how == "record":
        with gzip.open(args.file, "wt", compresslevel=9) as file:
            file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
        print(f"{len(rows)} requests recorded; outcomes {dict(Counter(row['report']['outcome'] for row in rows))}")
        return 0
    known = rows_of(args.file)
    assert len({row["case"] for row in rows}) == len(rows), "cases share a name"
    missing = [row["case"] for row in rows if row["case"] not in known]
    changed = [(row, lines) for row in rows if row["case"] in known and (lines := differences(known[row["case"]], row))]
    for row, lines in changed[: args.show]:
        print(row["case"], *lines, sep="\n    ")
    print(f"{len(rows)} requests: {len(changed)} differ, {len(missing)} are not in the record")
    return 1 if changed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
