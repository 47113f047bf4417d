"""Reads the file of an eval: one JSON object per line, with a prompt and what its answer is expected to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loramux.adapter_store.errors import InvalidEval
from loramux.adapter_store.formats.files.strict_json import InvalidJson, parse_strict_json
from loramux.platform.bodies.chat_request import ChatRequest
from loramux.platform.bodies.request_body import validated
from loramux.platform.errors import InvalidRequest
from loramux.platform.evals.file_digest import lines_sha256
from loramux.platform.evals.schema_check import SchemaNotSupported, check_schema

MAX_FILE_BYTES = 2 * 1024 * 1024
MAX_CASES = 1000
MAX_DEPTH = 32
"""Maximum nesting of a line's JSON."""
MAX_TEXTS = 1000
"""Maximum number of texts that an answer must contain."""
MAX_ANSWER_TOKENS = 4096


class Case(BaseModel):
    """One line. The graders that it names all grade the same answer."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    line: int
    prompt: str | None = Field(default=None, min_length=1)
    messages: list[dict[str, Any]] | None = None
    max_tokens: int = Field(default=256, ge=1, le=MAX_ANSWER_TOKENS)

    equal: str | None = None
    contains: str | list[str] | None = None
    fields_: dict[str, Any] | None = Field(default=None, alias="fields", min_length=1)
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    judge: str | None = Field(default=None, min_length=1)
    """What the judge is asked about the answer."""
    reference: str | None = Field(default=None, min_length=1)
    """A text whose likelihood is measured. The model does not generate it."""
    min_likelihood: float = Field(default=0.5, gt=0, le=1)

    @property
    def required(self) -> list[str]:
        """The texts that the answer must contain."""
        return [self.contains] if isinstance(self.contains, str) else list(self.contains or ())

    @property
    def needs_answer(self) -> bool:
        """False if the line only measures the likelihood of a reference."""
        graders = (self.equal, self.contains, self.fields_, self.schema_, self.judge)
        return any(one is not None for one in graders)


@dataclass(frozen=True, slots=True)
class CaseFile:
    cases: tuple[Case, ...]
    sha256: str

    @property
    def needs_judge(self) -> bool:
        return any(case.judge is not None for case in self.cases)


def read_cases(content: bytes) -> CaseFile:
    """Read a file of JSON lines. Empty lines are skipped. Raises InvalidEval, whose message never quotes the file."""
    if len(content) > MAX_FILE_BYTES:
        raise InvalidEval("file_too_large", f"the file has more than {MAX_FILE_BYTES} bytes", "file")
    cases: list[Case] = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        if len(cases) == MAX_CASES:
            raise InvalidEval("too_many_cases", f"the file has more than {MAX_CASES} lines", "file")
        try:
            cases.append(_case(line, number))
        except (InvalidJson, InvalidRequest, SchemaNotSupported) as error:
            raise InvalidEval("invalid_line", f"line {number}: {error}", f"file[{number}]") from None
    if not cases:
        raise InvalidEval("no_cases", "the file has no lines", "file")
    return CaseFile(tuple(cases), lines_sha256(content))


def check_lengths(file: CaseFile) -> None:
    """Raise InvalidEval if a line of a new file has too many texts. Evals from before this limit still run."""
    for case in file.cases:
        if len(case.required) > MAX_TEXTS:
            text = f"line {case.line}: contains: there are more than {MAX_TEXTS} texts"
            raise InvalidEval("invalid_line", text, f"file[{case.line}]")


def _case(line: bytes, number: int) -> Case:
    document = parse_strict_json(line)
    if not isinstance(document, dict):
        raise InvalidJson("it is not a JSON object")
    if "line" in document:
        raise InvalidJson("line is not a field")
    if is_deeper(document, MAX_DEPTH):
        raise InvalidJson("nesting is too deep")
    try:
        case = Case.model_validate({**document, "line": number})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part)[:40] for part in first["loc"])
        if first["type"] == "extra_forbidden":
            fields = (field.alias or name for name, field in Case.model_fields.items() if name != "line")
            raise InvalidJson(f"{place} is not a field of a line: use {', '.join(fields)}") from None
        raise InvalidJson(f"{place}: {first['msg']}") from None
    if (case.prompt is None) == (case.messages is None):
        raise InvalidJson("specify either prompt or messages")
    if not case.needs_answer and case.reference is None:
        raise InvalidJson("specify equal, contains, fields, schema, judge or reference")
    if case.contains is not None and not all(case.required):
        raise InvalidJson("contains: an empty text is in every answer")
    if case.messages is not None:
        validated({"model": "", "messages": case.messages}, ChatRequest)
    if case.schema_ is not None:
        check_schema(case.schema_)
    return case


def is_deeper(value: Any, most: int) -> bool:
    """Return whether JSON is nested more than `most` levels deep, without recursion."""
    level = [value]
    for _ in range(most):
        level = [
            item
            for one in level
            if isinstance(one, dict | list)
            for item in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return False
    return any(isinstance(one, dict | list) for one in level)
