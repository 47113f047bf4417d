"""The choice of parsers for a model's answers, in `parsers.json` or in a server's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType

from loramux.adapter_store.errors import AdapterRejected, printable
from loramux.adapter_store.extensions import extension_names
from loramux.adapter_store.formats.files.file_names import PARSERS_FILE
from loramux.adapter_store.formats.files.strict_json import parse_json_file

AUTO = "auto"
"""The chat template determines the parser."""
OFF = "off"
"""Nothing is parsed."""

PARSERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tool_call_parser": (
            *("functiongemma", "gemma4", "glm45", "harmony", "hermes", "llama3_json", "minimax_m2", "mistral"),
            *("phi", "pythonic", "qwen3_coder", "seed_oss"),
        ),
        "reasoning_parser": ("gemma4", "harmony", "mistral", "seed_oss", "think"),
    }
)
"""The names of the built-in parsers for each setting."""


@dataclass(frozen=True, slots=True)
class AnswerParsers:
    """For each setting, the name of a parser, AUTO or OFF. None means that no choice was made."""

    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    def document(self) -> dict[str, str]:
        """Return the settings that have a value."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def over(self, base: AnswerParsers) -> AnswerParsers:
        """Return these choices, with missing ones taken from `base`."""
        return AnswerParsers(**{**base.document(), **self.document()})


NO_CHOICE = AnswerParsers()


def problem_with_parser(setting: str, value: object) -> str | None:
    """Return the problem with a setting's value, or None if the value is valid.

    The tool parsers of the extensions that are installed here are valid, too.
    """
    added = extension_names("tool_parsers") if setting == "tool_call_parser" else ()
    valid = (AUTO, OFF, *PARSERS[setting], *added)
    return None if value in valid else f"{setting} must be one of {', '.join(valid)}"


def parse_answer_parsers(text: bytes) -> AnswerParsers:
    """Read a `parsers.json`. Raises AdapterRejected, whose `param` is the setting at fault or the file's name."""
    document = parse_json_file(text, PARSERS_FILE)
    if not isinstance(document, dict) or not document:
        valid = " or ".join(PARSERS)
        raise AdapterRejected("invalid_parsers", f"{PARSERS_FILE} must be a JSON object with {valid}", PARSERS_FILE)
    for setting, value in document.items():
        if setting not in PARSERS:
            shown = printable(setting, 60)
            raise AdapterRejected("invalid_parsers", f"{PARSERS_FILE} has no setting {shown}", setting)
        problem = problem_with_parser(setting, value)
        if problem is not None:
            raise AdapterRejected("invalid_parsers", problem, setting)
    return AnswerParsers(**document)
