"""The types of single values: how each is read, and the problem with one that cannot be used."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, WithJsonSchema
from pydantic_core import PydanticCustomError

MIB = 1024 * 1024
SHORTEST_KEY = 16
"""Fewest characters of a master key, as the store requires."""

_SIZE = re.compile(r"^\s*(\d+)\s*(B|KiB|MiB|GiB)?\s*$", re.IGNORECASE)
# https://www.rfc-editor.org/rfc/rfc1123#section-2.1, and the underscore that container networks have in names
_HOST_NAME = re.compile(r"^[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*\.?$")
_THOUSANDS = re.compile(r"^\s*(\d{1,6}(?:\.\d{1,6})?)\s*([km])i?\s*(?:tokens?)?\s*$", re.IGNORECASE)
_UNITS = {"b": 1, "kib": 1024, "mib": MIB, "gib": 1024 * MIB}

FieldProblem = tuple[tuple[str | int, ...], str, str]
"""Path below the section that was validated, what is wrong, and the remedy."""


SomeSection = TypeVar("SomeSection", bound="Section")


class Section(BaseModel):
    """A section of the configuration: frozen values. An unknown key is an error."""

    # ``defer_build``: one validator for the whole document, when it is first needed, instead of one for each section.
    # https://docs.pydantic.dev/latest/api/config/#pydantic.config.ConfigDict.defer_build
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, defer_build=True)

    @classmethod
    def defaults(cls) -> Self:
        """Return the section with its defaults, which are valid: calling the class would build its validator first.

        https://docs.pydantic.dev/latest/concepts/models/#creating-models-without-validation
        """
        return cls.model_construct()


def section_of(parent: Section, name: str, kind: type[SomeSection]) -> SomeSection:
    """Return the section *name* of *parent*; the defaults if *parent* was read without the keys of its feature."""
    section = getattr(parent, name, None)
    if isinstance(section, kind):
        return section
    return kind.defaults()


def raise_problems(problems: list[FieldProblem]) -> None:
    """Raise pydantic's error for all of *problems*; do nothing if there are none."""
    if problems:
        raise PydanticCustomError("field_problems", "does not add up", {"problems": problems})


def _problem(message: str, remedy: str) -> PydanticCustomError:
    return PydanticCustomError("field_problems", "is not usable", {"problems": [((), message, remedy)]})


def _size(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    match = _SIZE.match(value)
    if match is None:
        return value
    return int(match[1]) * _UNITS[(match[2] or "B").lower()]


def _tokens(value: Any) -> Any:
    """Return *value*; a number of thousands would be 1,000 to some and 1,024 to others, so it is a problem."""
    match = isinstance(value, str) and _THOUSANDS.match(value)
    if match:
        number, power = float(match[1]), "km".index(match[2].lower()) + 1
        plain, binary = int(number * 1000**power), int(number * 1024**power)
        raise _problem(f"{value.strip()!r} is no whole number", f"Write {plain}, or {binary} if K is meant as 1,024.")
    return value


def _split_text(value: Any) -> Any:
    # An environment variable or a secret from a file has no list syntax of its own.
    if isinstance(value, str):
        return [word.strip() for word in re.split(r"[,\n]", value) if word.strip()]
    return value


def _on_off(value: Any) -> Any:
    # YAML 1.1 reads the words on and off as booleans (https://yaml.org/type/bool.html). Tools such as Helm's toYaml do
    # so, and then write true or false.
    if value is True:
        return "on"
    if value is False:
        return "off"
    return value


def _secret(value: Any) -> Any:
    if value == "":
        return None
    if isinstance(value, str) and not (value.isascii() and value.isprintable() and " " not in value):
        raise _problem(
            "holds a character that no HTTP header can carry", "Remove spaces, line ends and non-ASCII text."
        )
    return value


def _header(value: Any) -> Any:
    # Spaces are allowed inside, unlike in a key: "Bearer <key>" has one.
    if isinstance(value, str) and not (value.isascii() and value.isprintable() and value == value.strip() != ""):
        raise _problem(
            "is no value that an HTTP header can carry", "Remove line ends, outer spaces and non-ASCII text."
        )
    return value


def _access_key(value: Any) -> Any:
    if value in ("", None):
        raise _problem("is an empty access key, which would let everybody in", "Give the key, or take the entry out.")
    return _secret(value)


def _master_key(value: Any) -> Any:
    value = _secret(value)
    if isinstance(value, str) and 0 < len(value) < SHORTEST_KEY:
        remedy = f"Give at least {SHORTEST_KEY} random characters, such as `openssl rand -hex 32` prints."
        raise _problem(f"is {len(value)} characters long", remedy)
    return value


def _other_key(value: Any) -> Any:
    if value in ("", None):
        raise _problem("is an empty key", "Give the key, or take the entry out.")
    return _master_key(value)


_ROUTES = ("/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/models")
"""Ends of URLs that are copied whole from a provider's example call."""


def _url(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    remedy = "Write it like https://api.openai.com/v1 or http://127.0.0.1:8000/v1."
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError as error:
        raise _problem(f"is no URL ({error})", remedy) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _problem("is no http(s) URL", remedy)
    if parts.query or parts.fragment or "?" in value or "#" in value:
        raise _problem("has a query or fragment", "Leave out everything from the ? or # on.")
    if "@" in parts.netloc:
        raise _problem("has a user or password in it", "Put the key in api_key and leave the URL plain.")
    if port == 0 or not value.isascii() or not value.isprintable() or " " in value:
        raise _problem("has a port or character no connection can use", remedy)
    return _base_url(value.rstrip("/"))


def _forward_proxy(value: Any) -> Any:
    if value in ("", None):
        return None
    if isinstance(value, SecretStr):
        return value
    remedy = "Write it like http://proxy.example:3128 or http://user:password@proxy.example:3128."
    try:
        parts = urlsplit(value)
        is_url = parts.scheme == "http" and bool(parts.hostname) and parts.port != 0 and parts.path in ("", "/")
    except (AttributeError, TypeError, ValueError):
        is_url = False
    # Not the parser's text, which may quote a part of the password.
    if not is_url or not (value.isascii() and value.isprintable()) or set(" ?#") & set(value):
        raise _problem("is no http URL of a proxy", remedy)
    return value


def _base_url(url: str) -> str:
    """Return *url* if it can be followed by a route."""
    for route in _ROUTES:
        if url.endswith(route):
            raise _problem(f"ends in the route {route}", "Leave it out: base URLs end before it, mostly in /v1.")
    if url.endswith("/v1/v1"):
        raise _problem("has /v1 twice", f"Write it once: {url.removesuffix('/v1')}")
    return url


def _store_url(value: Any) -> Any:
    schemes = ("redis://", "rediss://", "unix://", "redis+sentinel://", "redis+cluster://")
    if isinstance(value, str) and value not in ("embedded", "memory") and not value.startswith(schemes):
        raise _problem("names no kind of store", f"Use embedded, memory, or a URL beginning with {', '.join(schemes)}.")
    try:
        if isinstance(value, str) and value.startswith(("redis://", "rediss://")):
            _ = urlsplit(value).port  # raises ValueError if it is none
    except ValueError:
        # Not the parser's text, which may quote a part of the password.
        raise _problem("has no valid host and port", "Write it like redis://:password@host:6379/0.") from None
    return value


def _host(value: Any) -> Any:
    if not isinstance(value, str) or not value:
        return value
    bare = value.removeprefix("[").removesuffix("]").partition("%")[0]
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        if not _HOST_NAME.match(value):
            raise _problem(
                "is no host", "Write an address or name alone, such as 127.0.0.1; the port has its own key."
            ) from None
    return value


def _unknown_window(value: Any) -> Any:
    if value == "learn":
        return value
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _problem("is neither learn nor a number of tokens", "Write learn, or a window such as 131072.")
    return value


def _path(value: Any) -> Any:
    if isinstance(value, str) and value:
        return Path(value).expanduser()
    return value


Bytes = Annotated[
    int,
    BeforeValidator(_size),
    Field(gt=0),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": "^[0-9]+ *[KMG]iB$"}]}),
]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Tokens = Annotated[int, BeforeValidator(_tokens), Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
HeaderValue = Annotated[SecretStr, BeforeValidator(_header)]
OptionalSecret = Annotated[SecretStr | None, BeforeValidator(_secret)]
ForwardProxy = Annotated[SecretStr | None, BeforeValidator(_forward_proxy)]
MasterKey = Annotated[SecretStr | None, BeforeValidator(_master_key)]
OtherKey = Annotated[SecretStr, BeforeValidator(_other_key)]
AccessKey = Annotated[SecretStr, BeforeValidator(_access_key)]
FilePath = Annotated[Path, BeforeValidator(_path)]
UnknownWindow = Annotated[
    int | Literal["learn"],
    BeforeValidator(_unknown_window),
    WithJsonSchema({"anyOf": [{"const": "learn"}, {"type": "integer", "minimum": 1}]}),
]


SplitText = BeforeValidator(_split_text)
OnOff = BeforeValidator(_on_off)
BaseUrl = Annotated[str, BeforeValidator(_url)]
Host = Annotated[str, BeforeValidator(_host)]
StoreUrl = Annotated[str, BeforeValidator(_store_url)]
