"""A known fault that can be put back into the product, and the test that must fail then."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = "LORAMUX_MUTANT"
"""Environment variable that names the mutant which `tests.mutants.plugin` installs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    name: str
    fault: str
    """What went wrong, and where it was reported if that is known."""
    path: str
    """The changed file, relative to the repository's root."""
    changes: tuple[tuple[str, str], ...]
    """Pairs of a text that occurs exactly once in the file and its replacement."""
    test: str
    """The pytest argument that selects the test which catches the mutant."""

    @property
    def module(self) -> str:
        return "loramux." + self.path.removesuffix(".py").replace("/", ".")

    def source(self) -> str:
        """The changed source. Raises ValueError if a text to replace does not occur exactly once."""
        source = (ROOT / self.path).read_text()
        for old, new in self.changes:
            count = source.count(old)
            if count != 1:
                raise ValueError(f"{self.name}: a text to replace occurs {count} times in {self.path} instead of once")
            source = source.replace(old, new)
        return source
