from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from proxy.store.locks import FileLock


def test_one_holder_at_a_time_and_many_that_share(tmp_path: Path) -> None:
    """An exclusive lock keeps everybody out; shared ones keep only the exclusive one out."""
    one, two, three = (FileLock(tmp_path / "lock") for _ in range(3))
    assert one.take()
    assert not two.take()
    assert not two.take(shared=True)
    one.release()
    assert two.take(shared=True)
    assert three.take(shared=True)
    assert not one.take()
    assert (one.held, two.held, three.held) == (False, True, True)
    two.close()
    three.release()
    assert one.take()
    one.close()
    three.close()


def test_a_lock_that_was_handed_to_a_child_lasts_as_long_as_the_child(tmp_path: Path) -> None:
    """Closing our handle leaves the lock with the child that inherited it, and only with that one."""
    lock, other = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert lock.take()
    wait = [sys.executable, "-c", "input()"]
    heir = subprocess.Popen(wait, stdin=subprocess.PIPE, pass_fds=(lock.handle,))
    stranger = subprocess.Popen(wait, stdin=subprocess.PIPE)
    lock.close()
    assert not other.take()
    heir.communicate(b"\n")
    assert other.take()
    stranger.communicate(b"\n")
    other.close()
