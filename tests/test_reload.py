"""A configuration that is read again: what changes, what waits for a restart, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.features.settings import AllSettings
from proxy.reload import ConfigSource, changed_keys, needs_restart, with_fixed
from proxy.settings import Settings, load
from tests.support.forked_ullage import run_ullage

UPSTREAMS = [{"name": "a", "base_url": "http://127.0.0.1:1/v1", "api_key": "first-secret"}]


def write(file: Path, **sections: Any) -> Path:
    """Write a configuration; a new file takes the place of the old one, as editors do it."""
    fresh = file.with_suffix(".new")
    fresh.write_text(yaml.safe_dump({"upstreams": UPSTREAMS, **sections}))
    fresh.replace(file)
    return file


def source(file: Path) -> ConfigSource:
    """The source that a proxy has with *file*."""
    return ConfigSource(file, {}, load(file, {}, {}, AllSettings))


def test_what_changed_is_named_and_no_secret_is(tmp_path: Path) -> None:
    """Keys by their path, lists whole; a change moves the generation, another reading does not."""
    file = write(tmp_path / "ullage.yaml")
    read = source(file)
    assert not read.has_changed()
    keys = [{**UPSTREAMS[0], "api_key": "second-secret"}]
    write(file, upstreams=keys, compression={"high_mark": 0.8}, models=[{"name": "*", "context_window": 9_000}])
    assert read.has_changed()
    loaded = read.read()
    assert loaded.settings is not None
    assert loaded.state.changed == ("compression.high_mark", "models", "upstreams")
    assert loaded.state.generation == 2
    assert "secret" not in repr(loaded.state)
    again = read.read()
    assert (again.settings, again.state.generation) == (None, 2)


def test_a_replaced_file_is_another_one_whatever_its_time_and_size(tmp_path: Path) -> None:
    """A mounted ConfigMap is a link to another folder, whose files may have the same time."""
    file = write(tmp_path / "ullage.yaml", compression={"high_mark": 0.8})
    read, before = source(file), file.stat()
    write(file, compression={"high_mark": 0.7})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert read.has_changed()


def test_what_is_no_file_is_not_read_again(tmp_path: Path) -> None:
    """A pipe can be read once (`--config <(command)`); reading it again would stop the watch, and the end, for ever."""
    file = write(tmp_path / "ullage.yaml")
    read = source(file)
    file.unlink()
    os.mkfifo(file)
    assert read.has_changed()
    assert not read.has_changed()
    loaded = read.read()
    assert loaded.settings is None
    assert loaded.state.problems == (
        f"{file}: is no regular file and cannot be read again\n    Start again, or put a file in its place.",
    )
    file.unlink()
    write(file, compression={"high_mark": 0.8})
    assert read.has_changed()
    assert read.read().state.changed == ("compression.high_mark",)


def test_what_needs_a_restart_keeps_its_value_and_is_named(tmp_path: Path) -> None:
    """It is named as long as the file says something else than the process does."""
    file = write(tmp_path / "ullage.yaml")
    read = source(file)
    write(file, server={"port": 9999, "access_keys": ["k"]}, store={"url": "memory"})
    loaded = read.read()
    assert loaded.settings is not None
    assert (loaded.settings.server.port, loaded.settings.store.url) == (8484, "embedded")
    assert [key.get_secret_value() for key in loaded.settings.server.access_keys] == ["k"]
    assert (loaded.state.changed, loaded.state.needs_restart) == (("server.access_keys",), ("server.port", "store.url"))
    write(file, server={"access_keys": ["k"]})
    back = read.read()
    assert (back.settings, back.state.needs_restart, back.state.generation) == (None, (), 2)


@pytest.mark.parametrize(
    "broken",
    [
        "upstreams: [\n",
        "compresion: {}\n",
        "upstreams: []\n",
        "upstreams: [{name: a, base_url: 'http://x'}]\nserver: 3\n",
    ],
)
@pytest.mark.slow
def test_a_refused_file_changes_nothing_and_says_what_check_says(tmp_path: Path, broken: str) -> None:
    """The sentences are those of `ullage check`; a good file afterwards clears them."""
    file = write(tmp_path / "ullage.yaml")
    read = source(file)
    file.write_text(broken)
    loaded = read.read()
    assert (loaded.settings, loaded.state.generation) == (None, 1)
    checked = run_ullage("check", str(file)).stderr
    for problem in loaded.state.problems:
        assert problem in checked
    assert loaded.state.problems
    write(file, compression={"high_mark": 0.7})
    assert read.read().state.problems == ()


def test_a_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    """Nothing is taken from the defaults instead."""
    file = write(tmp_path / "ullage.yaml")
    read = source(file)
    file.unlink()
    assert read.has_changed()
    assert "cannot be read" in read.read().state.problems[0]


def test_lists_are_one_key_and_fixed_keys_are_known() -> None:
    """Every fixed key exists."""
    one, other = Settings(), Settings.model_validate({"server": {"limits": {"body": 2**20}}, "summaries": {"jobs": 2}})
    assert changed_keys(one, other) == ["server.limits.body", "summaries.jobs"]
    assert [needs_restart(key) for key in ("server.limits.body", "server.limitsx", "store", "summaries.jobs")] == [
        True,
        False,
        True,
        False,
    ]
    assert with_fixed(other, one).server == one.server
