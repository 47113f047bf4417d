"""A pytest plugin that puts one known fault back: `LORAMUX_MUTANT=NAME pytest -p tests.mutants.plugin TEST`.

Only the pytest process itself imports the changed module. The file on disk does not change.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

import pytest

from tests.mutants.known import MUTANTS
from tests.mutants.mutant import ENVIRONMENT, Mutant

NOT_IMPORTED = 90
"""Exit status of a run that never imported the changed module, and so tested nothing."""


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, mutant: Mutant) -> None:
        super().__init__(fullname, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        # Neither reads nor writes the cached bytecode, which belongs to the unchanged source.
        code = compile(self._mutant.source(), self.path, "exec", dont_inherit=True)
        assert isinstance(code, CodeType)
        return code


class _Finder:
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(fullname, spec.origin, self._mutant)
        return spec


_MUTANT = MUTANTS[os.environ[ENVIRONMENT]]
assert _MUTANT.module not in sys.modules
sys.meta_path.insert(0, _Finder(_MUTANT))


def pytest_sessionfinish(session: pytest.Session) -> None:
    module = sys.modules.get(_MUTANT.module)
    if module is None or not isinstance(module.__loader__, _Loader):
        session.exitstatus = NOT_IMPORTED
