from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import phrases


def test_each_phrase_is_found_with_its_line_and_a_suggestion() -> None:
    text = "Pages are read.\nThe pool is filled Anew, and whoever waits gives way.\n"
    assert list(phrases.findings(text)) == [
        (2, "Anew", "again"),
        (2, "gives way", "evict, yield or stop"),
        (2, "whoever", "name the person or the process"),
    ]


@pytest.mark.parametrize("text", ["a_name_anew = 1", "ways", "seats", "so many that", "a leeway"])
def test_identifiers_and_longer_words_pass(text: str) -> None:
    assert list(phrases.findings(text)) == []


def test_a_file_with_a_phrase_fails_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\nThis is read anew.\n")
    assert phrases.main([str(page)]) == 1
    assert f"{page}:3: 'anew': again" in capsys.readouterr().out
