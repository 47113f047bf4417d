"""A build backend that runs nothing of the project: its metadata is the PKG-INFO of the sdist."""

from __future__ import annotations

from email.parser import Parser
from pathlib import Path
from typing import Any


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return []


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    text = Path("PKG-INFO").read_text(encoding="utf-8")
    fields = Parser().parsestr(text, headersonly=True)
    name = f"{fields['Name'].replace('-', '_')}-{fields['Version']}.dist-info"
    folder = Path(metadata_directory) / name
    folder.mkdir()
    (folder / "METADATA").write_text(text, encoding="utf-8")
    return name
