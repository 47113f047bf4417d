from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from tests.strangers.sdists import unpacked

FILES = {
    "PKG-INFO": "Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n",
    "pyproject.toml": '[build-system]\nrequires = ["absent"]\nbuild-backend = "setuptools.build_meta"\n',
    "setup.py": "raise SystemExit('the build script ran')\n",
    "stranger/__init__.py": "",
    "tests/test_calls.py": "a call",
    "tests/deep/test_more.py": "more",
}


def test_the_wanted_files_of_an_sdist_are_unpacked_and_none_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source, folder = tmp_path / "source", Path("unpacked")
    source.mkdir()
    folder.mkdir()
    with tarfile.open(source / "stranger-1.0.tar.gz", "w:gz") as archive:
        for name, text in FILES.items():
            member = tarfile.TarInfo(f"stranger-1.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    index = ("--no-index", "--find-links", str(source))
    made = unpacked("stranger==1.0", ("tests/*",), folder, index)
    found = {str(path.relative_to(made)): path.read_text() for path in made.rglob("*") if path.is_file()}
    assert found == {"tests/test_calls.py": "a call", "tests/deep/test_more.py": "more"}
    assert list(folder.resolve().iterdir()) == [made]
    # A second call downloads nothing.
    assert unpacked("stranger==1.0", ("tests/*",), folder, ("--no-index",)) == made
