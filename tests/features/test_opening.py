"""Which features settings switch on, in which order, and that a folder may be missing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from proxy.core.models import Catalogue, ModelRule
from proxy.core.tokens.budget import Shares
from proxy.engine.features import Feature
from proxy.features import opening
from proxy.features.opening import FeatureParts, OpenHistory, open_features, open_history
from proxy.features.settings import FOLDERS, AllSettings
from proxy.server_tools.answer import ServerTools
from proxy.server_tools.tool import ServerTool
from proxy.settings import Settings
from proxy.store import Store, open_store
from proxy.tasks import Faults, Tasks
from tests.support.engine_fixtures import Replica

PRESENT = [name for name in FOLDERS if (Path(opening.__file__).parent / name).is_dir()]
HAS_HISTORY = (Path(opening.__file__).parent / "history").is_dir()

UPSTREAM = {"name": "stub", "base_url": "http://a"}
COMPRESSION = {
    "client_compaction": {"client_compaction": "answer"},
    "cap_results": {"stages": {"truncate": {"always": True}}},
    "deferred_tools": {"deferred_tools": {"enabled": True}},
    "recall": {"recall": {"enabled": True}},
}
ALL_ON: dict[str, Any] = {
    "compression": {key: value for name in PRESENT for key, value in COMPRESSION.get(name, {}).items()},
}
if "memories" in PRESENT:
    ALL_ON["memories"] = {"enabled": True}
if "context_management" in PRESENT:
    ALL_ON["upstreams"] = [{**UPSTREAM, "context_management": "own"}]


async def a_store(folder: Path) -> Store:
    tasks = Tasks(lambda name, error: None)
    return await open_store("memory", directory=folder, key=None, spawn=tasks.spawn, warn=lambda *_: None)


async def opened(folder: Path, **settings: Any) -> list[str]:
    """The folders of the features that *settings* switch on, in order."""
    replica = Replica()
    catalogue = Catalogue([ModelRule("*", "stub")], {}, "stub")
    parts = FeatureParts(
        AllSettings.model_validate({"upstreams": [UPSTREAM], **settings}),
        await a_store(folder),
        replica.reader,
        replica.compactions,
        catalogue.resolve,
        Shares(),
        Faults(),
        Tasks(lambda name, error: None).spawn,
    )
    return [type(part).__module__.split(".")[2] for feature in open_features(parts) for part in parts_of(feature)]


def parts_of(feature: Feature) -> Sequence[Feature | ServerTool]:
    """The tools of folders that one feature answers for; else the feature itself."""
    return feature.tools if isinstance(feature, ServerTools) else [feature]


async def test_a_feature_is_there_only_if_it_is_switched_on(tmp_path: Path) -> None:
    """As shipped views are answered and items of ours opened; with everything on, folders prepare in their order."""
    assert await opened(tmp_path) == [name for name in PRESENT if name in ("compress", "client_compaction")]
    assert list(dict.fromkeys(await opened(tmp_path, **ALL_ON))) == PRESENT


async def test_a_deleted_folder_is_a_feature_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its folder a feature is not opened, whatever the settings say, and the others are."""
    for name in PRESENT:
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, f"proxy.features.{name}.feature", None)
            left = [each for each in PRESENT if each != name]
            assert list(dict.fromkeys(await opened(tmp_path, **ALL_ON))) == left


async def test_a_fault_in_a_folder_is_no_missing_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is there and cannot be imported ends the start of the process."""
    for name in PRESENT:
        with monkeypatch.context() as patched:
            patched.delitem(sys.modules, f"proxy.features.{name}.feature", raising=False)
            patched.setitem(sys.modules, "proxy.features.opening", None)
            with pytest.raises(ImportError):
                await opened(tmp_path, **ALL_ON)


def ignore(name: str, facts: object) -> None:
    """Count nothing, and log nothing."""


async def test_without_its_folder_there_is_no_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is noted, no route is added, and nothing has to be finished."""
    monkeypatch.setitem(sys.modules, "proxy.features.history.feature", None)
    tasks = Tasks(lambda name, error: None)
    history = open_history(
        Settings(), await a_store(tmp_path), tasks, lambda outcome, count: None, lambda event, facts: None
    )
    assert history == OpenHistory()
    await history.finish(1.0)


@pytest.mark.skipif(not HAS_HISTORY, reason="the folder was deleted")
async def test_history_is_noted_and_can_be_read(tmp_path: Path) -> None:
    """One feature notes what was answered; callers have their routes."""
    tasks = Tasks(lambda name, error: None)
    history = open_history(
        Settings(), await a_store(tmp_path), tasks, lambda outcome, count: None, lambda event, facts: None
    )
    assert len(history.features) == 1
    assert history != OpenHistory()
