"""The sections ``server`` and ``store``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from proxy.settings.field_types import (
    MIB,
    AccessKey,
    Bytes,
    FieldProblem,
    FilePath,
    Host,
    MasterKey,
    OptionalSecret,
    OtherKey,
    Section,
    SplitText,
    StoreUrl,
    raise_problems,
)

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
"""The name in a Host header, compared as it is: a loopback listener answers no other name, so that no web page can
reach it by DNS rebinding. https://en.wikipedia.org/wiki/DNS_rebinding
"""


class Limits(Section):
    """Most that one worker process accepts."""

    body: Bytes = Field(default=64 * MIB, description="Bytes of a managed body; relayed ones stream without limit.")
    items: int = Field(default=20_000, gt=0, description="Messages or input items of one request.")
    inflation: int = Field(default=100, gt=0, description="Times its size that a compressed body may unfold to.")
    in_flight: int = Field(default=512, gt=0, description="Requests under way at once; more are answered 503.")
    in_flight_bytes: Bytes = Field(
        default=512 * MIB, description="Bytes of all managed bodies that have arrived; one caller alone has half."
    )
    headers: Bytes = Field(default=32 * 1024, ge=1024, description="Bytes of one header field, in both directions.")
    head: Bytes = Field(
        default=128 * 1024, ge=1024, description="Bytes of a request line and its header fields together."
    )
    fields: int = Field(default=100, gt=0, description="Header fields of one request.")
    keep_alive: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=75.0,
        description="Seconds after an answer in which a connection stays open: more than any balancer in front.",
    )
    connections: int = Field(default=2048, gt=0, description="Client connections; beyond, idle ones are closed.")


class Server(Section):
    """The listener, and who may use it."""

    host: Host = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(default=8484, ge=0, le=65535, description="TCP port; 0 takes any free one.")
    workers: int = Field(default=1, ge=1, le=256, description="Worker processes sharing the port.")
    access_keys: Annotated[tuple[AccessKey, ...], SplitText] = Field(
        default=(), description="Clients must send one of these keys; empty: no check."
    )
    access_keys_file: FilePath | None = Field(default=None, description="File with one access key per line.")
    admin_key: OptionalSecret = Field(default=None, description="Key of the admin routes; none: loopback only.")
    admin_key_file: FilePath | None = Field(default=None, description="File that holds admin_key.")
    open: bool = Field(default=False, description="Allow upstream keys on a non-loopback address without access keys.")
    open_metrics: bool = Field(default=False, description="Serve /metrics without admin_key beside access_keys.")
    origins: Annotated[tuple[str, ...], SplitText] = Field(
        default=(), description="Browser origins that may call, such as https://chat.example.org."
    )
    hosts: Annotated[tuple[str, ...], SplitText] = Field(
        default=(), description="Names by which a loopback listener may be called, beside addresses and localhost."
    )
    default_upstream: str = Field(default="", description="Upstream of paths without a model; empty: the first.")
    relay: Literal["stateless", "all"] = Field(
        default="stateless", description="Routes relayed when access_keys guard a shared upstream key."
    )
    websockets: Literal["manage", "relay", "refuse"] = Field(
        default="manage",
        description="WebSockets of /v1/responses. relay: byte for byte, unmanaged; refuse: clients use HTTP.",
    )
    limits: Limits = Limits.defaults()
    drain: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=300.0, description="Seconds after SIGTERM in which running requests may end."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems: list[FieldProblem] = []
        for index, origin in enumerate(self.origins):
            parts = urlsplit(origin)
            if parts.scheme not in ("http", "https") or f"{parts.scheme}://{parts.netloc}" != origin:
                remedy = "Write scheme, host and port only: https://chat.example.org."
                problems.append((("origins", index), "is no origin", remedy))
        for index, name in enumerate(self.hosts):
            if not _HOST.fullmatch(name):
                remedy = "Write the name alone, without scheme, port or wildcard: host.docker.internal."
                problems.append((("hosts", index), "is no host name", remedy))
        if self.limits.body > self.limits.in_flight_bytes:
            remedy = "Raise in_flight_bytes to at least limits.body."
            problems.append((("limits", "in_flight_bytes"), "is less than one body (server.limits.body)", remedy))
        if self.limits.headers > self.limits.head:
            problems.append(
                (("limits", "head"), "is less than one field (server.limits.headers)", "Raise limits.head.")
            )
        if self.limits.in_flight > self.limits.connections:
            message = "are fewer than the requests under way at once (server.limits.in_flight)"
            problems.append((("limits", "connections"), message, "Raise limits.connections: each request has its own."))
        raise_problems(problems)
        return self


class Store(Section):
    """The store of compaction records."""

    url: StoreUrl = Field(
        default="embedded",
        description="embedded, memory, redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://.",
    )
    path: FilePath = Field(
        default_factory=lambda: Path("~/.local/share/ullage").expanduser(), description="Data directory of embedded."
    )
    key: MasterKey = Field(default=None, description="Master key of the encryption; none: one is created.")
    key_file: FilePath | None = Field(default=None, description="File that holds key.")
    other_keys: Annotated[tuple[OtherKey, ...], SplitText] = Field(
        default=(), description="Further master keys that decrypt records: former ones, and the next one."
    )
    other_keys_file: FilePath | None = Field(default=None, description="File with one such key per line.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.other_keys and self.key is None:
            raise_problems(
                [(("other_keys",), "stand beside no key", "Set key to the master key that seals from now on.")]
            )
        return self
