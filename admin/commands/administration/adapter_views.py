"""Output of the adapter commands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from loramux.admin.commands.output import print_table, print_text, shown_time

if TYPE_CHECKING:
    from loramux.admin.client.client import Document


def shown_aliases(adapter: Document) -> str | None:
    """Return each alias with its versions, and their shares if there are several: `default=3 beta=3(90%)+4(10%)`."""
    return " ".join(f"{name}={shown_targets(targets)}" for name, targets in adapter["aliases"].items()) or None


def shown_sharing(num_own: int) -> str:
    """How an alias, or one side of an eval, shares the base's cache. The adapter computes the last `num_own` tokens."""
    return f"sharing all but the last {num_own} tokens"


def shown_divergence(found: Document) -> str:
    """The divergence that an eval with `share_base_cache` found."""
    if found["divergence"] is None:
        return "not measured on any line"
    measured = f"measured on {found['num_measured']} of {found['num_cases']} lines"
    return f"{found['divergence']:.4f} nats per token, {measured}"


def shown_targets(targets: Sequence[Document]) -> str:
    if len(targets) == 1:
        return str(targets[0]["version"])
    total = sum(target["weight"] for target in targets)
    return "+".join(f"{target['version']}({target['weight'] / total:.0%})" for target in targets)


_PARSERS = ("tool_call_parser", "reasoning_parser")
_MAX_SHOWN = 12
"""Maximum number of added tokens shown for a version."""


def print_versions(adapter: Document, versions: Sequence[Document], evals: Sequence[Document]) -> None:
    """`evals` are finished evals of the versions, newest first."""
    newest = {one["version"]: f"{one['score']:.3f} {one['name']}" for one in reversed(evals)}
    print_text(f"{adapter['model']} ({adapter['id']}, {adapter['state']})")
    print_table(
        ("version", "state", "aliases", "rank", "pages", "size", "digest", "files", "eval", "created", "error"),
        [
            (
                version["number"],
                version["state"],
                " ".join(_naming(adapter, version["number"])) or None,
                version["max_rank"],
                version["num_pages"],
                _shown_size(version),
                version["version_digest"] and version["version_digest"][:12],
                _own_files(version),
                newest.get(version["number"]),
                shown_time(version["created_at"]),
                version["error"] and version["error"]["code"],
            )
            for version in versions
        ],
    )


def print_version(adapter: Document, version: Document) -> None:
    """Print one version with the main facts of its validation report."""
    print_text(f"{adapter['model']}@{version['number']} ({version['id']}, {version['state']})")
    rows: list[tuple[str, object]] = [
        (name, version[name]) for name in ("digest", "version_digest", "max_rank", "num_pages")
    ]
    rows += [("size", _shown_size(version)), ("chat_template", version["chat_template"])]
    if version["invocation_tokens"] is not None:
        rows.append(("invocation_tokens", " ".join(map(str, version["invocation_tokens"]))))
    if version["task"] is not None:
        rows.append(("task", _shown_task(version["task"])))
    if version["added_tokens"]:
        rows.append(("added_tokens", _shown_tokens(version["added_tokens"])))
    own = version["report"].get("added_vocabulary", {})
    if "renamed" in own:
        rows.append(("renamed_tokens", _shown_tokens(own["renamed"])))
    rows += [(f"special_tokens {role}", json.dumps(content)) for role, content in own.get("special_tokens", {}).items()]
    settings = version["generation_config"] or {}
    rows += [(f"generation_config {name}", value) for name, value in settings.items()]
    rows += [(name, version[name]) for name in _PARSERS if version[name] is not None]
    rows.append(("aliases", " ".join(_naming(adapter, version["number"])) or None))
    rows += [("created", shown_time(version["created_at"])), ("ready", shown_time(version["ready_at"]))]
    if version["error"]:
        rows += [(f"error {name}", version["error"][name]) for name in ("code", "message", "param")]
    rows += [
        (f"report {name}", value) for name, value in version["report"].items() if not isinstance(value, list | dict)
    ]
    if features := version["report"].get("features"):
        rows.append(("report features", " ".join(features)))
    for key in ("trained_rows", "trained_vectors"):
        if trained := version["report"].get(key):
            rows.append((f"report {key}", ", ".join(f"{name} {count}" for name, count in trained.items())))
    print_table(("fact", "value"), rows)


def _shown_size(version: Document) -> str | None:
    from loramux.platform.amounts import size_text

    return None if version["size"] is None else size_text(version["size"])


def _shown_task(task: Document) -> str:
    """Return what a version is for, with its first labels."""
    labels = task.get("labels", [])
    shown = " ".join([task["kind"], *map(json.dumps, labels[:_MAX_SHOWN])])
    return shown if len(labels) <= _MAX_SHOWN else f"{shown} and {len(labels) - _MAX_SHOWN} more"


def _shown_tokens(tokens: Mapping[str, int]) -> str:
    """Return the first added tokens, with their IDs."""
    shown = " ".join(f"{token_id}={json.dumps(content)}" for content, token_id in list(tokens.items())[:_MAX_SHOWN])
    return shown if len(tokens) <= _MAX_SHOWN else f"{shown} and {len(tokens) - _MAX_SHOWN} more"


def _own_files(version: Document) -> str | None:
    own = {"template": version["chat_template"], "settings": version["generation_config"]}
    names = [name for name, value in own.items() if value is not None]
    if any(version[name] is not None for name in _PARSERS):
        names.append("parsers")
    if "added_vocabulary" in version["report"]:
        names.append("tokens")
    return " ".join(names) or None


def _naming(adapter: Document, number: int) -> list[str]:
    return [
        name for name, targets in adapter["aliases"].items() if any(target["version"] == number for target in targets)
    ]
