"""Which versions the server of a data directory has taken for validation, in files that outlive it."""

from __future__ import annotations

from pathlib import Path

_SUFFIX = ".claim"


class Claims:
    """One empty file in `directory` for each version: written before the row is taken, removed after it is let go."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def note(self, version_id: str) -> bool:
        """False where the version is noted already."""
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            self._place(version_id).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def forget(self, version_id: str) -> None:
        self._place(version_id).unlink(missing_ok=True)

    def noted(self) -> list[str]:
        return sorted(path.name.removesuffix(_SUFFIX) for path in self._directory.glob(f"*{_SUFFIX}"))

    def _place(self, version_id: str) -> Path:
        return self._directory / f"{version_id}{_SUFFIX}"
