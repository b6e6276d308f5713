"""What becomes of the command line if another distribution brings a package of the same name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.proxy_process import ROOT


@pytest.mark.slow
def test_another_package_called_proxy_is_named(tmp_path: Path) -> None:
    """A distribution whose files replaced ours is named at start, with what to do, in place of a traceback."""
    shutil.copytree(ROOT / "proxy", tmp_path / "proxy", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "proxy" / "__init__.py").write_text('"""Another proxy."""\n')
    record = tmp_path / "proxy.py-2.4.9.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: proxy.py\nVersion: 2.4.9\n")
    (record / "RECORD").write_text("proxy/__init__.py,,\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from proxy.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "serve"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "proxy.py installs a package 'proxy' too" in done.stderr
    assert "Traceback" not in done.stderr
