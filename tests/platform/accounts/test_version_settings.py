from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import pytest
from sqlalchemy import delete, insert

from loramux.adapter_store.formats.files.file_names import GENERATION_FILE, PARSERS_FILE, TEMPLATE_FILE
from loramux.adapter_store.formats.version_files.answer_parsers import NO_CHOICE, AnswerParsers
from loramux.adapter_store.formats.version_files.further_files import FurtherFiles, version_digest
from loramux.adapter_store.formats.version_files.generation_config import SamplingDefaults
from loramux.adapter_store.registry.records import AdapterRef
from loramux.adapter_store.registry.version_files import replace_further_files
from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.accounts import version_settings
from loramux.platform.accounts.model_names import ResolvedModel
from loramux.platform.accounts.tenants import Tenant
from loramux.platform.accounts.version_settings import VersionSettings, VersionSettingsCache
from loramux.platform.errors import Unavailable

BASE = SamplingDefaults(temperature=0.7, top_k=20)


Add = Callable[..., ResolvedModel]


def files(template: str | None = None, settings: str | None = None) -> dict[str, bytes]:
    given = {TEMPLATE_FILE: template, GENERATION_FILE: settings}
    return {name: text.encode() for name, text in given.items() if text is not None}


@pytest.fixture
def add_version(clocked: Database, acme: Tenant) -> Add:
    with clocked.write() as connection:
        values = {"id": "ada_1", "tenant_id": acme.id, "name": "support", "created_us": 0}
        connection.execute(insert(schema.adapters).values(values))
    numbers = itertools.count(1)

    def add(contents: Mapping[str, bytes]) -> ResolvedModel:
        number, digest = next(numbers), "a" * 64
        version_id = f"adv_{number}"
        own = version_digest(digest, FurtherFiles(contents).checksums)
        values = {"id": version_id, "adapter_id": "ada_1", "number": number, "state": "ready", "digest": digest}
        with clocked.write() as connection:
            row = {**values, "version_digest": own, "upload_id": "upl_1", "report": {}, "created_us": 0}
            connection.execute(insert(schema.adapter_versions).values(row))
            replace_further_files(connection, version_id, FurtherFiles(contents))
        ref = AdapterRef(acme.id, "acme", "ada_1", "support", version_id, number, digest, 8, own)
        return ResolvedModel(f"acme/support@{number}", ref)

    return add


def test_version_settings_complete_those_of_the_base(clocked: Database, add_version: Add) -> None:
    cache = VersionSettingsCache(clocked, BASE)
    both = cache.find(add_version(files("{{ messages }} é", '{"temperature": 0.0, "max_new_tokens": 9}')))
    assert both.template == "{{ messages }} é"
    assert both.defaults == SamplingDefaults(temperature=0.0, top_k=20, max_new_tokens=9)
    assert cache.find(add_version(files("other"))) == VersionSettings("other", BASE)
    plain = add_version({})
    assert cache.find(plain) == cache.find(ResolvedModel("base", None)) == VersionSettings(None, BASE)


def test_parsers_of_the_base_suit_only_its_own_template(clocked: Database, add_version: Add) -> None:
    chosen = AnswerParsers("hermes", "off")
    cache = VersionSettingsCache(clocked, BASE, base_parsers=chosen)
    assert cache.find(add_version({})).parsers == chosen
    assert cache.find(add_version(files(settings="{}"))).parsers == chosen
    assert cache.find(add_version(files("other"))).parsers == NO_CHOICE


def test_parsers_of_a_version_take_precedence(clocked: Database, add_version: Add) -> None:
    cache = VersionSettingsCache(clocked, BASE, base_parsers=AnswerParsers("hermes", "off"))
    own = {PARSERS_FILE: b'{"tool_call_parser": "auto"}'}
    assert cache.find(add_version(own)).parsers == AnswerParsers("auto", "off")
    assert cache.find(add_version({**files("other"), **own})).parsers == AnswerParsers("auto", None)


def test_version_whose_parser_is_no_longer_installed_is_unavailable(clocked: Database, add_version: Add) -> None:
    cache = VersionSettingsCache(clocked, BASE)
    with pytest.raises(Unavailable, match="tool_call_parser must be one of auto, off, ") as refused:
        cache.find(add_version({PARSERS_FILE: b'{"tool_call_parser": "of-an-extension"}'}))
    assert refused.value.code == "adapter_unavailable"


def test_settings_of_adapters_can_be_switched_off(clocked: Database, add_version: Add) -> None:
    cache = VersionSettingsCache(clocked, BASE, applies_adapter_defaults=False)
    found = cache.find(add_version(files("mine", '{"temperature": 0.0}')))
    assert found == VersionSettings("mine", BASE), "the template is not a default"


def test_end_tokens_are_no_default(clocked: Database, add_version: Add) -> None:
    cache = VersionSettingsCache(clocked, BASE, applies_adapter_defaults=False)
    found = cache.find(add_version(files(settings='{"temperature": 0.0, "eos_token_id": [7, 9]}')))
    assert found == VersionSettings(None, BASE, eos_token_ids=(7, 9))


def test_a_copy_of_the_bases_template_is_not_the_versions_own(clocked: Database, add_version: Add) -> None:
    chosen = AnswerParsers("hermes", "off")
    cache = VersionSettingsCache(
        clocked, BASE, base_parsers=chosen, is_copied_template=lambda source, special_tokens: source == "the base's"
    )
    copied = cache.find(add_version(files("the base's")))
    assert (copied.template, copied.parsers) == (None, chosen)
    assert cache.find(add_version(files("other"))).template == "other"


def test_database_is_read_once_for_each_digest(clocked: Database, add_version: Add) -> None:
    cache = VersionSettingsCache(clocked)
    first, equal = add_version(files("mine")), add_version(files("mine"))
    found = cache.find(first)
    with clocked.write() as connection:
        connection.execute(delete(schema.adapter_version_files))
    assert cache.find(first) is cache.find(equal) is found
    with pytest.raises(Unavailable) as refused:
        VersionSettingsCache(clocked).find(first)
    assert refused.value.code == "adapter_unavailable"


def test_least_recently_used_versions_are_forgotten(
    clocked: Database, add_version: Add, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_settings, "MAX_CACHED_VERSIONS", 2)
    cache = VersionSettingsCache(clocked)
    first, second, third = (add_version(files(text)) for text in "abc")
    cache.find(first)
    cache.find(second)
    cache.find(first)
    cache.find(third)
    with clocked.write() as connection:
        connection.execute(delete(schema.adapter_version_files))
    assert [cache.find(model).template for model in (first, third)] == ["a", "c"]
    with pytest.raises(Unavailable):
        cache.find(second)
