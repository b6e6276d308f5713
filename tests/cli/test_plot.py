"""The picture of a replay: a PNG, and a clear word where nothing can draw."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from proxy.cli.plot import MOST, CannotPlot, draw
from proxy.cli.replay import Replayed, Turn

TURNS = tuple(Turn(900 * at, 700 if at == 5 else 600 + at, 1000, 0, 0, at == 5, ("fold",)) for at in range(1, 9))
REFUSED = Turn(5000, None, 1000, 0, 0, False, ())


@pytest.mark.parametrize("count", [0, 1, 3, MOST + 2])
def test_a_picture_is_drawn(count: int, tmp_path: Path) -> None:
    """Any number of conversations makes a PNG, also with refused requests and with none at all."""
    found = [Replayed(f"s{at}", "m", 1200, (*TURNS, REFUSED)) for at in range(count)]
    draw([*found, Replayed("none", "m", None, (), trouble="unknown")], tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where matplotlib is missing, the error says what to install, and no file is left."""
    whole = importlib.import_module

    def without(name: str) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return whole(name)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(CannotPlot, match=r"ullage\[plot\]"):
        draw([], tmp_path / "p.png")
    assert not (tmp_path / "p.png").exists()
