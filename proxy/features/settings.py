"""The settings with the keys of all features: a feature whose folder was deleted has no key.

A folder whose feature can be configured has a module ``settings``. Its ``SECTIONS`` are subclasses of sections in
``proxy.settings``, each with the keys that the feature adds there. When this module is imported they are put together
into sections of the same names, as the JSON Schema shows them and worker processes unpickle them.
"""

from __future__ import annotations

from importlib import import_module
from types import GenericAlias, ModuleType
from typing import Any, Final, TypeVar

from pydantic import create_model

from proxy.settings import Settings, compression, upstreams
from proxy.settings.field_types import Section

FOLDERS: Final = (
    "compress",
    "client_compaction",
    "context_management",
    "cap_results",
    "memories",
    "deferred_tools",
    "recall",
)
"""The folders in the order in which their features prepare a request.

``compress`` answers a request by itself, before any other feature changes it. ``client_compaction`` replaces items of
ours, which the others could not read. ``cap_results`` comes after ``context_management``, because it need not cap a
result that is cleared.
"""

HISTORY: Final = "history"
"""The folder of the feature that prepares no request: it only records answered ones."""

SomeSection = TypeVar("SomeSection", bound=Section)


def feature_module(folder: str, name: str) -> ModuleType | None:
    """Return the module *name* of a feature's folder; None if there is no such module, or the folder was deleted."""
    package = f"proxy.features.{folder}"
    try:
        return import_module(f"{package}.{name}")
    except ModuleNotFoundError as error:
        if error.name in (package, f"{package}.{name}"):
            return None
        raise


_MODULES = [module for folder in (*FOLDERS, HISTORY) if (module := feature_module(folder, "settings")) is not None]


def _extended(section: type[SomeSection], name: str = "", **fields: Any) -> type[SomeSection]:
    """Return *section* with the keys that features add to it, under *name* if that is given.

    *fields* replace those fields whose types are themselves extended.
    """
    added = [extension for module in _MODULES for extension in module.SECTIONS if issubclass(extension, section)]
    return create_model(
        name or section.__name__,
        __base__=(*reversed(added), section),  # the fields of the last base come first
        __doc__=section.__doc__,
        __module__=__name__,
        __cls_kwargs__={"title": section.__name__},
        **fields,
    )


TruncateStage = _extended(compression.TruncateStage)
Stages = _extended(compression.Stages, truncate=(TruncateStage, TruncateStage.defaults()))
Compression = _extended(compression.Compression, stages=(Stages, Stages.defaults()))
Upstream = _extended(upstreams.Upstream)
AllSettings = _extended(
    Settings,
    "AllSettings",
    compression=(Compression, Compression.defaults()),
    upstreams=(GenericAlias(tuple, (Upstream, ...)), ()),
)


def summary_lines(settings: Settings) -> list[tuple[str, str]]:
    """Return the lines that features add to the start-up summary, each as its title and its text."""
    lines: list[tuple[str, str]] = []
    for module in _MODULES:
        if hasattr(module, "summary_lines"):
            lines += module.summary_lines(settings)
    return lines
