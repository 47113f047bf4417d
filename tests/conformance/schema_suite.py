"""Structured output on the official JSON Schema test suite: `make campaign NAME=schemas`.

Every schema in the suite is checked like a request's schema. For each accepted schema, random answers are generated
under its grammar. The `jsonschema` package must accept every answer. An answer that reaches the token limit is first
completed with closing tokens. The suite comes from the source distribution of `jsonschema`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jsonschema import Draft7Validator, Draft201909Validator, Draft202012Validator, ValidationError
from llguidance import LLMatcher, LLTokenizer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from loramux.engine.constraints.limits import parser_limits
from loramux.engine.constraints.vocabulary import load_vocabulary
from loramux.platform.errors import InvalidRequest
from loramux.platform.grammars.checker import GrammarChecker
from loramux.platform.grammars.constraint import Constraint
from tests.demo_base import DEMO_BASE
from tests.engine.constraints.masks import allowed_tokens, follow

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv" / "schema-suite"
VALIDATORS: dict[str, Any] = {
    "draft7": Draft7Validator,
    "draft2019-09": Draft201909Validator,
    "draft2020-12": Draft202012Validator,
}
VOCAB_SIZE, EOS = 1024, 1
MAX_TOKENS = 200
END_BIAS = 0.3
"""Probability that a random answer ends at a position where its grammar allows the end."""
MAX_COMPLETING_TOKENS = 2000
"""Maximum number of tokens for completing a cut answer."""
CLOSING = (b"}", b"]", b'"')
"""Tokens that lead an answer towards its end, in order of preference. Inside a string, only the last one is used."""


@dataclass
class Counts:
    """Counts of one keyword's schemas and of the answers generated for the accepted schemas."""

    schemas: int = 0
    accepted: int = 0
    ended: int = 0
    cut: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    """Answers that violate their schema."""


def suite(folder: Path = FOLDER) -> Path:
    """Return the directory with the suite's drafts. Download the suite if it is missing."""
    drafts = next(folder.glob("*/json/tests"), None)
    if drafts is None:
        wanted = f"jsonschema=={version('jsonschema')}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", wanted]
        subprocess.run([*command, "-d", str(folder)], check=True)
        with tarfile.open(next(folder.glob("jsonschema-*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        drafts = next(folder.glob("*/json/tests"))
    return drafts


def cases(draft: str) -> Iterator[tuple[str, Any]]:
    for path in sorted((suite() / draft).glob("*.json")):
        for group in json.loads(path.read_text()):
            yield path.stem, group["schema"]


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    was_cut: bool
    """True if the answer had not ended after MAX_TOKENS random tokens and was then completed."""


class Writer:
    def __init__(self, matcher: LLMatcher, vocabulary: LLTokenizer, generator: random.Random) -> None:
        self._grammar = follow(matcher.deep_copy(), VOCAB_SIZE)
        self._vocabulary = vocabulary
        self._closing = [token for text in CLOSING for token in vocabulary.tokenize_bytes(text)]
        self._random = generator
        self._tokens: list[int] = []
        self._has_ended = False

    def answer(self) -> Answer:
        """Generate an answer. If it is cut at MAX_TOKENS, complete it or raise RuntimeError."""
        self._write(MAX_TOKENS, is_closing=False)
        was_cut = not self._has_ended
        self._write(MAX_COMPLETING_TOKENS, is_closing=True)
        if not self._has_ended:
            raise RuntimeError(f"cannot be completed: {self._text()!r}")
        return Answer(self._text(), was_cut)

    def _write(self, max_tokens: int, *, is_closing: bool) -> None:
        for _ in range(max_tokens):
            self._has_ended = self._has_ended or self._grammar.is_complete
            if self._has_ended:
                return
            token = self._choose(is_closing)
            self._grammar.accept(token)
            if token == EOS:
                self._has_ended = True
            else:
                self._tokens.append(token)

    def _choose(self, is_closing: bool) -> int:
        mask = self._grammar.mask()
        assert mask is not None, self._grammar.failure
        allowed = allowed_tokens(mask)
        if EOS in allowed and (is_closing or len(allowed) == 1 or self._random.random() < END_BIAS):
            return EOS
        closing = next((token for token in self._closing_tokens() if token in allowed), None) if is_closing else None
        return int(self._random.choice([one for one in allowed if one != EOS])) if closing is None else closing

    def _closing_tokens(self) -> list[int]:
        has_open_string = re.sub(rb"\\.", b"", self._vocabulary.decode_bytes(self._tokens)).count(b'"') % 2
        return self._closing[-1:] if has_open_string else self._closing

    def _text(self) -> str:
        return self._vocabulary.decode_bytes(self._tokens).decode()


async def run(num_answers: int, drafts: list[str]) -> dict[str, dict[str, Counts]]:
    vocabulary = load_vocabulary(DEMO_BASE, VOCAB_SIZE, (EOS,))
    checker = GrammarChecker(DEMO_BASE, VOCAB_SIZE, (EOS,))
    found: dict[str, dict[str, Counts]] = {}
    try:
        for draft in drafts:
            counts = found[draft] = defaultdict(Counts)
            for index, (keyword, schema) in enumerate(track([*cases(draft)], description=draft)):
                one = counts[keyword]
                one.schemas += 1
                try:
                    constraint = Constraint.of_json("json_schema", schema, "schema")
                    grammar = await checker.grammar(draft, constraint)
                except InvalidRequest as refusal:
                    one.refusals[refusal.message[:120]] += 1
                    continue
                one.accepted += 1
                matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())
                validator = VALIDATORS[draft](schema)
                for number in range(num_answers):
                    try:
                        answer = Writer(matcher, vocabulary, random.Random(index * num_answers + number)).answer()
                        one.cut += answer.was_cut
                        one.ended += not answer.was_cut
                        validator.validate(json.loads(answer.text))
                    except RuntimeError as error:
                        one.broken.append(f"{schema}: {error}")
                    except ValidationError as error:
                        one.broken.append(f"{answer.text!r} breaks {schema}: {error.message}")
                        break
    finally:
        checker.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=20, help="random answers for each accepted schema")
    parser.add_argument("--drafts", default=",".join(VALIDATORS))
    parser.add_argument("--out", type=Path, help="write the counts as JSON")
    arguments = parser.parse_args()
    found = asyncio.run(run(arguments.answers, arguments.drafts.split(",")))
    table = Table(title=f"JSON Schema's test suite, {arguments.answers} random answers per accepted schema")
    for heading in ("draft", "schemas", "accepted", "answers that ended", "cut and completed", "broke their schema"):
        table.add_column(heading, justify="left" if heading == "draft" else "right")
    for draft, counts in found.items():
        columns = zip(
            *((one.schemas, one.accepted, one.ended, one.cut, len(one.broken)) for one in counts.values()), strict=True
        )
        table.add_row(draft, *(str(sum(column)) for column in columns))
    console = Console()
    console.print(table)
    broken = [text for counts in found.values() for one in counts.values() for text in one.broken]
    for text in broken:
        console.print(text)
    if arguments.out:
        document = {
            draft: {keyword: {**vars(one), "refusals": dict(one.refusals)} for keyword, one in sorted(counts.items())}
            for draft, counts in found.items()
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
