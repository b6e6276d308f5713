"""Configuration files for tests: written, loaded, and what is wrong with them."""

from pathlib import Path

import pytest

from proxy.features.settings import AllSettings
from proxy.settings import SettingsError, load

EXAMPLE = Path(__file__).parents[2] / "config" / "ullage.yaml"
UPSTREAM = "upstreams:\n  - {name: a, base_url: 'http://127.0.0.1:1/v1'}\n"


def write_settings(folder, text):
    file = folder / "ullage.yaml"
    file.write_text(text, "utf-8")
    return file


def problems(folder, text, environ=None, overrides=None):
    with pytest.raises(SettingsError) as caught:
        load(write_settings(folder, text), overrides or {}, environ or {}, AllSettings)
    return caught.value.problems


def only_problem(folder, text, environ=None):
    present = problems(folder, text, environ)
    assert len(present) == 1, present
    return present[0]
