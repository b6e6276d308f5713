"""LiteLLM's configuration files, with those that they include."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.cli.litellm_files import NotLiteLLM, read_file


@pytest.mark.parametrize(
    "text",
    [
        *("model_list: 3\n", "[", "upstreams: []\n", "[]\n", "include: 3\n", ""),
        *("a: 2026-99-99\n", "a: " + "[" * 3000 + "]" * 3000, "a: \xe9"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    """It says that this is no configuration of LiteLLM's, in one line that begins with its name."""
    file = tmp_path / "x.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(NotLiteLLM) as caught:
        read_file(file)
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert message.count("x.yaml") == 1
    assert "\n" not in message


def test_included_files_are_read(tmp_path: Path) -> None:
    """Lists of included files are appended, other values replaced; a file that includes itself ends."""
    (tmp_path / "models").mkdir()
    (tmp_path / "config.yaml").write_text(
        "include: [models/a.yaml]\ngeneral_settings: {master_key: x}\nmodel_list: [{model_name: own}]\n"
    )
    (tmp_path / "models" / "a.yaml").write_text(
        "include: [b.yaml, ../config.yaml]\ngeneral_settings: {master_key: y}\nmodel_list: [{model_name: a}]\n"
    )
    (tmp_path / "models" / "b.yaml").write_text("model_list: [{model_name: b}]\n")
    config = read_file(tmp_path / "config.yaml")
    assert [entry["model_name"] for entry in config["model_list"]] == ["own", "a", "b"]
    assert config["general_settings"] == {"master_key": "y"}
    assert "include" not in config
    (tmp_path / "models" / "b.yaml").unlink()
    with pytest.raises(OSError, match=r"b\.yaml"):
        read_file(tmp_path / "config.yaml")
