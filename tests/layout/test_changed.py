"""`make test-changed` in small repositories."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests import changed
from tests.changed import Checkout, NoChanges, changed_files, main, since, without_covered

FILES: Mapping[str, str] = {
    "pyproject.toml": "",
    "engine/loop/engine.py": "",
    "engine/decoder/layers.py": "",
    "platform/threads.py": "",
    "platform/quotas/rules.py": "",
    "docs/concepts.md": "",
    "tests/conftest.py": "import tests.ports\n",
    "tests/ports.py": "",
    "tests/layout/test_layout.py": "def test_one() -> None: ...\n",
    "tests/engine/loop/test_engine.py": "from tests.engine.simulated import Simulation\n",
    "tests/engine/simulated.py": "from tests.engine import card\n",
    "tests/engine/card.py": "",
    "tests/engine/loop/toy.py": "",
    "tests/engine/loop/test_process.py": 'command = Path(__file__).with_name("toy.py")\n',
    "tests/engine/execution/test_layers.py": "from loramux.engine.decoder.layers import Layer\n",
    "tests/platform/test_threads.py": "",
    "tests/platform/quotas/conftest.py": "from tests.platform.quotas.oracle import Oracle\n",
    "tests/platform/quotas/oracle.py": "class Oracle: ...\n",
    "tests/platform/quotas/test_rules.py": "",
    "tests/platform/quotas/rules.json": "{}",
}


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def commit(root: Path, subject: str) -> str:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", subject)
    return git(root, "rev-parse", "HEAD")


@pytest.fixture(autouse=True)
def plain_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the user's configuration, and the repository of a Git hook that runs the tests."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, os.devnull)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A checkout of `main` with one commit."""
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    commit(tmp_path, "first")
    return tmp_path


def listed(root: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["--list", *arguments], root) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("engine/loop/engine.py", ["tests/engine/loop"]),
        ("engine/loop/deleted.py", ["tests/engine/loop"]),
        ("platform/quotas/deep/templates/page.html", ["tests/platform/quotas"]),
        # Nothing mirrors these two, and tests/engine has no direct tests.
        ("engine/decoder/layers.py", ["tests/engine/execution/test_layers.py"]),
        ("engine/decoder/other.py", []),
        ("platform/threads.py", ["tests/platform/test_threads.py"]),
        ("platform/new_package/code.py", ["tests/platform/test_threads.py"]),
        ("platform/quotas/README.md", ["tests/docs"]),
        ("docs/concepts.md", ["tests/docs"]),
        ("docs/architecture.svg", ["tests/docs"]),
        ("tests/platform/quotas/test_rules.py", ["tests/platform/quotas/test_rules.py"]),
        ("tests/platform/quotas/test_deleted.py", []),
        ("tests/platform/quotas/conftest.py", ["tests/platform/quotas"]),
        ("tests/platform/quotas/oracle.py", ["tests/platform/quotas"]),
        ("tests/platform/quotas/rules.json", ["tests/platform/quotas"]),
        ("tests/engine/simulated.py", ["tests/engine/loop/test_engine.py"]),
        ("tests/engine/card.py", ["tests/engine/loop/test_engine.py"]),
        ("tests/engine/loop/toy.py", ["tests/engine/loop/test_process.py"]),
        ("tests/engine/unused.py", []),
        ("tests/ports.py", ["tests"]),
        ("tests/conftest.py", ["tests"]),
        ("pyproject.toml", []),
        ("Makefile", []),
        (".github/workflows/ci.yml", []),
        (".src/loramux/engine", []),
    ],
)
def test_choice_for_a_changed_file(repository: Path, path: str, tests: list[str]) -> None:
    assert list(Checkout(repository, [path]).choose(path).tests) == tests


def test_deleted_shared_code_chooses_the_tests_that_still_import_it(repository: Path) -> None:
    (repository / "tests/engine/card.py").unlink()
    changes = changed_files(repository, "HEAD")
    assert changes == ["tests/engine/card.py"]
    assert Checkout(repository, changes).choose(changes[0]).tests == ("tests/engine/loop/test_engine.py",)


@pytest.mark.parametrize("path", ["pyproject.toml", "constraints.lock", "Makefile"])
def test_change_that_concerns_every_test_says_so(repository: Path, path: str) -> None:
    assert "make test" in Checkout(repository, [path]).choose(path).reason


def test_files_inside_a_chosen_folder_are_not_named_again() -> None:
    chosen = ["tests/engine/loop/test_a.py", "tests/engine", "tests/engine/loop", "tests/engines/test_b.py"]
    assert without_covered(chosen) == ("tests/engine", "tests/engines/test_b.py")
    assert without_covered([*chosen, "tests"]) == ("tests",)


def test_all_kinds_of_changes_since_main_are_found(repository: Path) -> None:
    git(repository, "switch", "--quiet", "--create", "feature")
    (repository / "committed.py").write_text("")
    git(repository, "mv", "platform/threads.py", "platform/pools.py")
    commit(repository, "second")
    (repository / "staged.py").write_text("")
    git(repository, "add", "staged.py")
    (repository / "pyproject.toml").write_text("# unstaged\n")
    (repository / "untracked ü.py").write_text("")
    (repository / "docs/concepts.md").unlink()
    (repository / ".gitignore").write_text("ignored.py\n")
    (repository / "ignored.py").write_text("")
    # Later commits of main are no changes of the branch.
    git(repository, "stash", "--quiet", "--include-untracked")
    git(repository, "switch", "--quiet", "main")
    (repository / "of_main.py").write_text("")
    commit(repository, "third")
    git(repository, "switch", "--quiet", "feature")
    git(repository, "stash", "pop", "--quiet")
    start = since(repository, "main")
    assert start.commit == git(repository, "rev-parse", "main~1")
    assert changed_files(repository, start.commit) == [
        ".gitignore",
        "committed.py",
        "docs/concepts.md",
        "platform/pools.py",
        "platform/threads.py",
        "pyproject.toml",
        "staged.py",
        "untracked ü.py",
    ]


def test_no_changes_run_nothing(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed, "TWO_AT_A_TIME", ("--no-such-option",))
    assert main([], repository) == 0
    assert "Nothing changed since HEAD left main" in capsys.readouterr().out


def test_detached_head_is_compared_with_main(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(repository, "switch", "--quiet", "--detach")
    (repository / "platform/quotas/rules.py").write_text("LIMIT = 1\n")
    second = commit(repository, "second")
    said = listed(repository, capsys)
    assert "HEAD left main" in said
    assert "  platform/quotas/rules.py: the mirrored folder\n    tests/platform/quotas\n" in said
    assert said.endswith("Tests: tests/layout tests/platform/quotas\n")
    assert git(repository, "rev-parse", "HEAD") == second


def test_without_main_the_upstream_branch_or_the_previous_commit_is_used(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    git(repository, "branch", "--move", "main", "trunk")
    git(repository, "switch", "--quiet", "--create", "feature")
    for subject in ("second", "third"):
        (repository / f"{subject}.md").write_text("")
        commit(repository, subject)
    said = listed(repository, capsys)
    assert "no branch main shares a commit with HEAD, so the comparison is with the previous commit" in said
    assert "second.md" not in said
    assert "third.md" in said
    git(repository, "branch", "--quiet", "--set-upstream-to", "trunk")
    said = listed(repository, capsys)
    assert "the upstream branch" in said
    assert "second.md" in said
    assert "HEAD left trunk" in listed(repository, capsys, "--base", "trunk")


def test_only_commit_without_main_is_refused(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(repository, "branch", "--move", "main", "trunk")
    with pytest.raises(NoChanges):
        since(repository, "main")
    assert main([], repository) == 2
    assert "no previous commit" in capsys.readouterr().err


def test_folder_outside_git_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], tmp_path) == 2
    assert "not a git repository" in capsys.readouterr().err


def test_chosen_tests_run_with_the_users_arguments(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed, "TWO_AT_A_TIME", ())
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (repository / "tests/layout/test_layout.py").write_text(
        'def test_layout() -> None: open("layout", "w").close()\ndef test_failure() -> None: raise ValueError\n'
    )
    (repository / "tests/platform/quotas/test_rules.py").write_text(
        'def test_quotas() -> None: open("quotas", "w").close()\n'
    )
    assert main([], repository) == 1
    assert main(["--deselect", "tests/layout/test_layout.py::test_failure"], repository) == 0
    assert (repository / "layout").exists()
    assert (repository / "quotas").exists()
