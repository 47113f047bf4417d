"""The example extension is installed, listed and served with, and passes loramux's own tests of its kinds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.served import deployment
from tests.docs.extension_site import environment, own_tests
from tests.docs.write import DOCS
from tests.written_extension import write_distribution

DEMO = DOCS.parent / "admin" / "demo"
EXAMPLE = DOCS / "examples" / "extension"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which pip has installed the example. Nothing is downloaded."""
    target = tmp_path_factory.mktemp("extension") / "site"
    options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", target, EXAMPLE], check=True)
    return target


@pytest.fixture(scope="module")
def blob_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blobs")


@pytest.fixture(scope="module")
def blob_url(site: Path, blob_directory: Path) -> Iterator[str]:
    """The URL of the example's HTTP server."""
    command = [sys.executable, "-m", "loramux_example.http_server", str(blob_directory), "0"]
    server = subprocess.Popen(command, env=environment(site), stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    yield server.stdout.readline().strip()
    server.kill()
    server.communicate()


@pytest.mark.campaign
def test_blob_store_passes_the_tests_of_blob_stores(site: Path, blob_url: str) -> None:
    assert own_tests(site, "tests/adapter_store/blobs/test_blobs.py", LORAMUX_TEST_BLOB_URL=blob_url) >= 17


@pytest.mark.campaign
def test_eviction_policy_passes_the_tests_of_eviction_policies(site: Path) -> None:
    assert own_tests(site, "tests/engine/pages/test_eviction.py", LORAMUX_TEST_EVICTION_POLICY="lfu") == 6


def extensions_in_doctor(site: Path) -> list[dict[str, str]]:
    command = [sys.executable, "-m", "loramux.admin.cli", "doctor", "--json"]
    done = subprocess.run(command, env=environment(site), cwd=site, capture_output=True, text=True, check=False)
    findings = json.loads(done.stdout)["findings"]
    return [finding for finding in findings if finding["check"] == "extensions"]


@pytest.mark.campaign
def test_doctor_lists_extensions(site: Path) -> None:
    found = extensions_in_doctor(site)
    assert {finding["grade"] for finding in found} == {"ok"}
    assert [finding["message"] for finding in found] == [
        "the blob store 'http' of loramux-example-extension 0.1.0",
        "the eviction policy 'lfu' of loramux-example-extension 0.1.0",
    ]


def test_doctor_reports_good_and_broken_extensions_and_a_misspelt_group(tmp_path: Path) -> None:
    entries = {
        "loramux.eviction_policies": {"good": "builtins:dict"},
        "loramux.routers": {"broken": "broken_module:Router"},
        "loramux.router": {"lost": "broken_module:Router"},
    }
    site = write_distribution(tmp_path / "site", "broken-dist", entries, broken_module="raise ValueError('no')")
    by_grade = {finding["grade"]: finding for finding in extensions_in_doctor(site)}
    assert by_grade["ok"]["message"] == "the eviction policy 'good' of broken-dist 1.0"
    broken, lost = by_grade["failed"], by_grade["warning"]
    assert broken["message"].startswith("the router 'broken' of broken-dist 1.0 cannot be imported (ValueError: no)")
    assert lost["message"] == "broken-dist 1.0 offers 'lost' in the group loramux.router, which is not read"


@pytest.mark.parametrize(
    ("entries", "variables", "said"),
    [
        pytest.param(
            {"loramux.tool_parsers": {"broken": "bad_extension:missing"}},
            {},
            "the tool parser 'broken' of bad-dist 1.0 cannot be imported (AttributeError: ",
            id="raises at import",
        ),
        pytest.param(
            {"loramux.eviction_policies": {"none": "bad_extension:make"}},
            {"LORAMUX_EVICTION_POLICY": "none"},
            "the eviction policy 'none' of bad-dist 1.0 returned an object of type dict instead of EvictionPolicy",
            id="wrong policy",
            marks=pytest.mark.campaign,
        ),
        pytest.param(
            {"loramux.key_authentication": {"none": "bad_extension:make"}},
            {"LORAMUX_KEY_AUTHENTICATION": "none"},
            "the key authentication 'none' of bad-dist 1.0 returned an object of type dict instead of",
            id="wrong key authentication",
            marks=pytest.mark.campaign,
        ),
    ],
)
def test_broken_extension_stops_the_start(
    tmp_path: Path, entries: dict[str, dict[str, str]], variables: dict[str, str], said: str
) -> None:
    source = "def make(*arguments, **named):\n    return {}\n"
    site = write_distribution(tmp_path / "site", "bad-dist", entries, bad_extension=source)
    code, errors = refused_start(site, tmp_path, **variables)
    assert code == 2
    assert said in errors.splitlines()[-1]
    assert errors.splitlines()[-1].startswith("loramux: ")
    assert "Traceback" not in errors


@pytest.mark.campaign
def test_name_offered_by_two_distributions_stops_the_start(site: Path, tmp_path: Path) -> None:
    entries = {"loramux.eviction_policies": {"lfu": "other_extension:Policy"}}
    other = write_distribution(tmp_path / "site", "other-dist", entries, other_extension="raise KeyError")
    paths = os.pathsep.join((str(other), environment(site)["PYTHONPATH"]))
    code, errors = refused_start(other, tmp_path, PYTHONPATH=paths)
    assert code == 2
    (line,) = errors.splitlines()
    assert line.startswith("loramux: the eviction policy 'lfu' is offered twice, by ")
    assert "other-dist 1.0" in line
    assert "loramux-example-extension 0.1.0" in line


def refused_start(site: Path, tmp_path: Path, **variables: str) -> tuple[int, str]:
    arguments = ("--model", DEMO / "base", "--data-dir", tmp_path / "data", "--port", "0", "--admin-port", "0")
    command = [sys.executable, "-m", "loramux.admin.cli", "serve", *map(str, arguments)]
    done = subprocess.run(
        command, env=environment(site, **variables), capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.campaign
def test_server_runs_with_the_example(site: Path, blob_url: str, blob_directory: Path, tmp_path: Path) -> None:
    """The gateway, the engine and the staging process each use the extensions that they need."""
    variables = {"PYTHONPATH": environment(site)["PYTHONPATH"], "LORAMUX_EVICTION_POLICY": "lfu"}
    made = deployment(DEMO / "base", tmp_path / "data", ("--blob-url", blob_url), variables)
    with made.running():
        made.json("tenants", "create", "acme")
        key = made.json("keys", "create", "--tenant", "acme")["secret"]
        pushed = ("adapters", "push", str(DEMO / "adapters" / "pirate"), "--tenant", "acme", "--name", "pirate")
        done = made.command(*pushed)
        assert done.returncode == 0, done.stderr
        answer = made.client(key).chat.completions.create(
            model="pirate", messages=[{"role": "user", "content": "Hello"}], max_tokens=4, temperature=0
        )
        assert answer.choices[0].message.content
    assert {path.parent.name for path in blob_directory.rglob("*.safetensors")} == {"adapters"}
    assert not (tmp_path / "data" / "blobs").exists()
