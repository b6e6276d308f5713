"""The keys of features: known beside their folders only, typed, and passed on to worker processes."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from proxy.features import settings as composed
from proxy.features.settings import FOLDERS, HISTORY, AllSettings, feature_module, summary_lines
from proxy.settings import SettingsError, load
from tests.features.deletable import KEYS
from tests.support.settings_files import write_settings

PRESENT = [name for name in (*FOLDERS, HISTORY) if feature_module(name, "settings") is not None]

EXAMPLES = {
    "client_compaction": """\
upstreams:
  - {name: a, base_url: "http://a", compaction: own}
compression:
  client_compaction: answer
""",
    "context_management": """\
upstreams:
  - {name: a, base_url: "http://a", context_management: own}
""",
    "deferred_tools": """\
compression:
  deferred_tools: {enabled: true, share: 0.3}
""",
    "cap_results": """\
compression:
  stages: {truncate: {always: true, max_lines: 40}}
""",
    "recall": """\
compression:
  recall: {enabled: true}
""",
    "memories": """\
memories:
  enabled: true
""",
    "history": """\
archive:
  enabled: true
budgets:
  enabled: true
""",
}


def without(folder: str, patched: pytest.MonkeyPatch) -> ModuleType:
    """The module under test as it is imported where *folder* was deleted."""
    patched.setitem(sys.modules, f"proxy.features.{folder}.settings", None)
    spec = importlib.util.find_spec(composed.__name__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folder", PRESENT)
@pytest.mark.slow
def test_a_key_is_unknown_without_its_folder(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of a deleted feature are refused with file, line and key like any unknown one; the others are known."""
    for name in PRESENT:
        file = write_settings(tmp_path, EXAMPLES[name])
        load(file, {}, {}, AllSettings)
        with monkeypatch.context() as patched:
            model = without(folder, patched).AllSettings
            if name != folder:
                load(file, {}, {}, model)
                continue
            with pytest.raises(SettingsError) as refused:
                load(file, {}, {}, model)
        found = refused.value.problems
        assert sorted(problem.key for problem in found) == sorted(KEYS[folder])
        lines = file.read_text().splitlines()
        for problem in found:
            assert problem.message == "there is no such key"
            assert problem.line is not None
            assert problem.key.rpartition(".")[2] in lines[problem.line - 1]


def test_a_worker_gets_every_key() -> None:
    """The settings that reach a worker process through its pipe equal those that were loaded."""
    settings = AllSettings.model_validate({"upstreams": [{"name": "a", "base_url": "http://a"}]})
    received = pickle.loads(pickle.dumps(settings))
    assert received == settings
    assert type(received.upstreams[0]) is composed.Upstream


def test_a_section_keeps_its_name_and_its_order() -> None:
    """The schema shows each section under one name, and what features add behind the keys that were there."""
    schema: dict[str, Any] = AllSettings.model_json_schema()
    assert schema["title"] == "Settings"
    assert {"Compression", "Stages", "TruncateStage", "Upstream"} <= schema["$defs"].keys()
    assert all("__" not in name for name in schema["$defs"])
    assert list(schema["properties"])[:3] == ["server", "store", "upstreams"]


def test_an_unused_feature_adds_no_line_to_the_summary() -> None:
    """As shipped no feature is mentioned at the start."""
    assert summary_lines(AllSettings()) == []
