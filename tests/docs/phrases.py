from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUFFIXES = frozenset({".html", ".md", ".py", ".toml", ".yaml", ".yml"})

NOT_READ = frozenset({Path(__file__), Path(__file__).with_name("test_phrases.py")})

SUGGESTIONS: Mapping[str, str] = {
    r"\banew\b": "again",
    r"\bsuch as (?:is|are|was|were|has|have)\b": "name the thing",
    r"\bg(?:ive|ives|iving|ave) way\b": "evict, yield or stop",
    r"\b(?:whoever|whomever)\b": "name the person or the process",
    r"\bthat which\b": "name the thing",
    r"\bmakes \d": "reaches, or measures",
    r"\bso many\b(?! (?:as|that))": "give the number, or name what is counted",
    r"\bnothing but\b": "only",
    r"\ball the same\b": "anyway, or leave it out",
    r"\bin the mean\b": "on average",
    r"\b(?:wherefrom|whereto|whereupon|thereof|therein|wherein)\b": "start a new sentence",
    r"\bfor else\b": "otherwise",
    r"\bsequence seats?\b|\bfree seats?\b": "sequence slot",
    r"\bwere (?:it|there|they) not\b": "if ... did not",
}

ANY = re.compile("|".join(SUGGESTIONS), re.IGNORECASE)


def findings(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield each phrase in `text` with its line number, counted from 1, and a suggested replacement."""
    # Nearly all files contain no phrase, and a single search is five times as fast as one for each phrase.
    if ANY.search(text) is None:
        return
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, suggestion in SUGGESTIONS.items():
            for match in re.finditer(pattern, line, re.IGNORECASE):
                yield number, match.group(), suggestion


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [Path(name) for name in listing.split("\0") if name]


def main(arguments: list[str]) -> int:
    """Check the files named in `arguments`, or all tracked files. Return 1 if a phrase was found, otherwise 0."""
    names = [Path(name) for name in arguments] or tracked_files()
    found = 0
    for name in names:
        path = ROOT / name
        if path.suffix not in SUFFIXES or path in NOT_READ or not path.is_file():
            continue
        for number, phrase, suggestion in findings(path.read_text()):
            found += 1
            print(f"{name}:{number}: {phrase!r}: {suggestion}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
