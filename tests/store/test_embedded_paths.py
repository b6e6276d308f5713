from __future__ import annotations

import stat
from pathlib import Path

import pytest

from proxy.store.backend import EmbeddedUnavailable
from proxy.store.sqlite_file import file_system, private_directory, refuse_network_file_system
from tests.store.conftest import Opener

MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:40 / /home/with\\040space rw shared:2 - nfs4 server:/export rw,vers=4.2
31 30 254:1 / /home/with\\040space/local rw - xfs /dev/vdb rw
32 22 0:41 / /mnt/share rw - cifs //server/share rw
33 22 0:42 / /over rw - nfs server:/a rw
34 33 254:2 / /over rw - ext4 /dev/vdc rw
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    """A list of mounts as Linux writes it."""
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTS)
    return path


def test_an_open_directory_is_closed_to_others(tmp_path: Path) -> None:
    """A data directory of ours that others could read is ours alone afterwards."""
    tmp_path.chmod(0o755)
    private_directory(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/ullage", "ext4"),
        ("/home/with space/u", "nfs4"),
        ("/home/with space/local/u", "xfs"),
        ("/mnt/share", "cifs"),
        ("/mnt/shared", "ext4"),
        ("/over/u", "ext4"),
    ],
)
def test_the_file_system_is_that_of_the_deepest_mount(mounts: Path, path: str, kind: str) -> None:
    """Of several mounts the deepest decides, and of those on one point the last."""
    assert file_system(Path(path), mounts) == kind


def test_a_network_file_system_is_refused_with_a_word(mounts: Path) -> None:
    """The error names the setting, the directory and the kind; a local disk passes, and so does an unknown one."""
    with pytest.raises(EmbeddedUnavailable, match=r"store\.path /mnt/share/u is on a network file system \(cifs\)"):
        refuse_network_file_system(Path("/mnt/share/u"), mounts)
    refuse_network_file_system(Path("/var/lib/ullage"), mounts)
    refuse_network_file_system(Path("/mnt/share/u"), mounts / "missing")


def _add_mount(mounts: Path, point: Path) -> None:
    mounts.write_text(MOUNTS + f"40 22 0:50 / {point.absolute()} rw - nfs4 server:/x rw\n")


async def test_the_store_is_memory_on_a_network_file_system(
    opener: Opener, mounts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is created there, and the warning says why."""
    _add_mount(mounts, opener.directory.parent)
    monkeypatch.setattr("proxy.store.sqlite_file.refuse_network_file_system.__defaults__", (mounts,))
    store = await opener("embedded")
    assert (store.state().kind, store.state().up) == ("memory", False)
    assert opener.events == ["store.memory_instead"]
    assert "nfs4" in str(opener.warned[0][1]["cause"])
    assert not opener.directory.exists()
