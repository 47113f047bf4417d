"""Modules that a suite imports but that no served call needs.

They are made on import. Each name in them is a class without behaviour, which can be called, subclassed, subscripted,
used as a decorator and compared. Only the values given to `allow_absent` are real.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _AbsentType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(name)

    def __getitem__(cls, _key: Any) -> Any:
        return cls

    def __or__(cls, _other: Any) -> Any:
        return cls

    def __ror__(cls, _other: Any) -> Any:
        return cls


class Absent(metaclass=_AbsentType):
    """Anything of an absent module. As a decorator, it returns the function."""

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        if cls.__name__ != "Absent" and len(arguments) == 1 and not options and callable(arguments[0]):
            return arguments[0]
        return super().__new__(cls)

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        return

    def __call__(self, *arguments: Any, **_options: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(name)

    def __bool__(self) -> bool:
        return False

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_raised: object) -> None:
        return

    def __iter__(self) -> Any:
        return iter(())


def absent(name: str) -> type[Absent]:
    return _AbsentType(name, (Absent,), {})


class _AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(name)


class _Finder:
    """The last finder, so that modules that exist take precedence."""

    def __init__(self, tops: frozenset[str], values: Mapping[str, Mapping[str, Any]]) -> None:
        self._tops = tops
        self._values = values

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._tops:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self._values.get(module.__name__, {}))


def allow_absent(tops: Sequence[str], values: Mapping[str, Mapping[str, Any]]) -> None:
    """Let modules below the packages `tops` be imported although they are missing.

    `values` contains the names that have a meaning, by module.
    """
    sys.meta_path.append(_Finder(frozenset(tops), values))  # type: ignore[arg-type]
