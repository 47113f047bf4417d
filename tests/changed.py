"""Run the tests of what changed since the branch left main: `make test-changed`.

Product files are tested by the mirrored folder, test files by themselves, and shared test code by the tests that import
it. `tests/layout` always runs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
PRODUCT = frozenset({"kernels", "migrations", "adapter_store", "engine", "platform", "admin", "benchmarks"})
ALWAYS = "tests/layout"
CONCERN_EVERY_TEST = ("pyproject.toml", "constraints", "Makefile")
"""How the names of files begin whose changes can break any test."""
TWO_AT_A_TIME = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
SHOWN = 5
"""Test files and folders that are listed for each changed file. The last line names them all."""

_DOTTED = re.compile(r"\btests(?:\.\w+)+")
_FROM = re.compile(r"\bfrom (tests[\w.]*) import (\([^)]*\)|[^\n]*)")
_FILE = re.compile(r"\b\w+\.py\b")


class NoChanges(Exception):
    """Git cannot say what changed. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Since:
    commit: str
    words: str
    """How the commit was found, for the user."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The test files and folders to run for one changed file, and why."""

    path: str
    tests: tuple[str, ...]
    reason: str


def since(root: Path, base: str) -> Since:
    """Find the commit that the working tree is compared with. Raises NoChanges."""
    _git(root, "rev-parse", "--git-dir")
    for name in (base, f"origin/{base}"):
        commit = _try_git(root, "merge-base", "HEAD", name)
        if commit:
            return Since(commit, f"HEAD left {name} at {commit[:10]}")
    lacking = f"no branch {base} shares a commit with HEAD, so the comparison is with"
    for name, words in (("@{upstream}", "the upstream branch"), ("HEAD~1", "the previous commit")):
        commit = _try_git(root, "merge-base", "HEAD", name)
        if commit:
            return Since(commit, f"{lacking} {words}, {commit[:10]}")
    raise NoChanges(f"there is no branch {base}, no upstream branch and no previous commit to compare with")


def changed_files(root: Path, commit: str) -> list[str]:
    """Every file that differs between the commit and the working tree. A renamed file appears under both names."""
    tracked = _git(root, "diff", "--name-only", "--no-renames", "-z", commit)
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return sorted({name for name in (tracked + untracked).split("\0") if name})


class Checkout:
    """A working tree, and which of its tests use which shared test code."""

    def __init__(self, root: Path, changed: Iterable[str]) -> None:
        """`changed` includes deleted files, so that the tests that still import them are found."""
        self._root = root
        self._changed = frozenset(changed)

    def choose(self, name: str) -> Choice:
        path = PurePosixPath(name)
        top = path.parts[0]
        if path.suffix == ".md" or top == "docs":
            return Choice(name, ("tests/docs",), "documentation")
        if top == "tests":
            return self._for_test_code(path)
        if top in PRODUCT:
            return self._for_product(path)
        if name.startswith(CONCERN_EVERY_TEST):
            return Choice(name, (), "it can affect every test, so also run `make test`")
        return Choice(name, (), f"no tests but {ALWAYS}")

    def _for_test_code(self, path: PurePosixPath) -> Choice:
        name = str(path)
        if _is_test(path):
            return Choice(name, (name,), "a test") if name in self._sources else Choice(name, (), "a deleted test")
        if path.name == "conftest.py":
            folders = (str(path.parent),) if self._tests_in(path.parent) else ()
            return Choice(name, folders, "fixtures of this folder")
        if path.suffix != ".py":
            return Choice(name, self._nearest(path.parent), "a file beside these tests")
        users = self._users_of(name)
        chosen = without_covered(
            str(user.parent) if user.name == "conftest.py" else str(user)
            for user in map(PurePosixPath, users)
            if user.name == "conftest.py" or _is_test(user)
        )
        return Choice(name, chosen, "shared test code, used by these tests" if chosen else "no test imports it")

    def _for_product(self, path: PurePosixPath) -> Choice:
        name = str(path)
        mirror = PurePosixPath("tests", path.parent)
        if self._tests_in(mirror):
            return Choice(name, self._nearest(mirror), "the mirrored folder")
        # A package without a mirrored folder is tested through other packages.
        package = "" if path.parts[0] == "benchmarks" else "loramux."
        module = re.compile(rf"\b{re.escape(package + '.'.join(path.with_suffix('').parts))}\b")
        importing = [test for test, source in self._sources.items() if _is_test(test) and module.search(source)]
        chosen = without_covered([*self._nearest(mirror), *importing])
        return Choice(name, chosen, "no folder mirrors it: the nearest one, and the tests that import it")

    def _nearest(self, folder: PurePosixPath) -> tuple[str, ...]:
        """The folder or its nearest parent with tests. Of a top-level folder, only its direct tests."""
        while len(folder.parts) > 2 and not self._tests_in(folder):
            folder = folder.parent
        if len(folder.parts) > 2:
            return (str(folder),)
        return tuple(test for test in self._tests_in(folder) if PurePosixPath(test).parent == folder)

    def _tests_in(self, folder: PurePosixPath) -> list[str]:
        return [name for name in self._sources if _is_test(name) and folder in PurePosixPath(name).parents]

    def _users_of(self, name: str) -> set[str]:
        """The files that use a file of shared test code, directly or through other files."""
        found: set[str] = set()
        waiting = [name]
        while waiting:
            new = self._users.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    @cached_property
    def _sources(self) -> Mapping[str, str]:
        """The text of each Python file below tests/, by its path."""
        paths = sorted((self._root / "tests").rglob("*.py"))
        return {path.relative_to(self._root).as_posix(): path.read_text() for path in paths}

    @cached_property
    def _users(self) -> Mapping[str, set[str]]:
        """The files that use each file of shared test code.

        A file uses the modules that it imports. It also uses the modules and file names that it mentions, because some
        tests start shared code as a process.
        """
        modules: dict[str, str] = {}
        files: dict[str, list[str]] = defaultdict(list)
        for name in sorted({*self._sources, *(one for one in self._changed if _is_test_code(one))}):
            modules[name.removesuffix(".py").removesuffix("/__main__").replace("/", ".")] = name
            files[PurePosixPath(name).name].append(name)
        users: dict[str, set[str]] = defaultdict(set)
        for user, source in self._sources.items():
            mentioned = set(_DOTTED.findall(source))
            for package, imported in _FROM.findall(source):
                mentioned |= {f"{package}.{name}" for name in re.findall(r"\w+", imported)}
            used = {modules[module] for name in mentioned if (module := _module_of(name, modules))}
            below = f"{PurePosixPath(user).parent}/"
            used |= {file for name in _FILE.findall(source) for file in files[name] if file.startswith(below)}
            for file in used - {user}:
                users[file].add(user)
        return users


def without_covered(tests: Iterable[str]) -> tuple[str, ...]:
    """Sort test files and folders, without those inside another one of the folders."""
    chosen = set(tests)
    return tuple(sorted(one for one in chosen if not {str(folder) for folder in PurePosixPath(one).parents} & chosen))


def _is_test(name: str | PurePosixPath) -> bool:
    path = PurePosixPath(name)
    return path.parts[0] == "tests" and path.match("test_*.py")


def _is_test_code(name: str) -> bool:
    return name.startswith("tests/") and name.endswith(".py")


def _module_of(dotted: str, modules: Mapping[str, str]) -> str:
    """The longest start of a dotted name that is a module, or an empty string."""
    while dotted and dotted not in modules:
        dotted = dotted.rpartition(".")[0]
    return dotted


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoChanges(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout


def _try_git(root: Path, *arguments: str) -> str | None:
    try:
        return _git(root, *arguments).strip()
    except NoChanges:
        return None


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Print which tests were chosen and why, and run them. Return pytest's exit status, or 2 if Git fails."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.changed",
        description=(__doc__ or "").partition("\n")[0],
        epilog="Other arguments go to pytest.",
        allow_abbrev=False,
    )
    parser.add_argument("--base", default="main", help="the branch to compare with (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="only print the tests")
    options, for_pytest = parser.parse_known_args(arguments)
    try:
        start = since(root, options.base)
        changed = changed_files(root, start.commit)
    except NoChanges as error:
        print(error, file=sys.stderr)
        return 2
    if not changed:
        print(f"Nothing changed since {start.words}: no tests to run.")
        return 0
    print(f"{len(changed)} files changed since {start.words}:")
    checkout = Checkout(root, changed)
    choices = [checkout.choose(name) for name in changed]
    for choice in choices:
        print(f"  {choice.path}: {choice.reason}")
        for test in choice.tests[:SHOWN]:
            print(f"    {test}")
        if len(choice.tests) > SHOWN:
            print(f"    and {len(choice.tests) - SHOWN} more")
    chosen = without_covered([ALWAYS, *(test for choice in choices for test in choice.tests)])
    print(f"Tests: {' '.join(chosen)}", flush=True)
    if options.list:
        return 0
    command = [sys.executable, "-m", "pytest", *TWO_AT_A_TIME, *chosen, *for_pytest]
    return subprocess.run(command, cwd=root, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
