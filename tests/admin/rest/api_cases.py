from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.config import SchemathesisConfig
from schemathesis.core.parameters import ParameterLocation
from schemathesis.generation import GenerationMode

# A well-formed call can still fail, for example because it names another tenant or its prompt is too long.
MEANT_OTHERWISE = [*range(200, 300), 400, 401, 403, 404, 409, 412, 413, 422, 429]

Known = Callable[[str], Mapping[str, Any]]
"""Maps an operation's path to names of existing objects, by parameter."""


@dataclass(slots=True)
class Cases:
    num_generated: int = 0
    statuses: Counter[int] = field(default_factory=Counter)

    @property
    def num_calls(self) -> int:
        return self.statuses.total()


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of test data and its share of all test data.

    Operations check the key first. Most data is therefore generated from a document that requires no key, and sent with
    valid keys.
    """

    mode: GenerationMode
    is_guarded: bool
    share: float


KINDS = (
    Kind(GenerationMode.POSITIVE, is_guarded=True, share=0.05),
    Kind(GenerationMode.NEGATIVE, is_guarded=True, share=0.05),
    Kind(GenerationMode.POSITIVE, is_guarded=False, share=0.45),
    Kind(GenerationMode.NEGATIVE, is_guarded=False, share=0.45),
)
CALLS_EACH = 3
"""Number of times that a campaign sends each case. Generating a case takes far longer than sending it."""

INVALID_EVERY = 6
"""A short run sends invalid data to every sixth operation. Only the campaign `api` sends it to the others."""


def call_all(
    document: Mapping[str, Any],
    url: str,
    keys: Sequence[str],
    known: Known,
    num_calls: int,
    number: int = 0,
    is_thorough: bool = True,
    cases: Cases | None = None,
) -> Cases:
    """Call all operations with valid and invalid data, making about `num_calls` calls in total.

    Each case is sent unchanged, then with `known` names filled in, and then with another key. The first of `keys` must
    have the most rights. Unless `is_thorough`, each case is sent in only one of these forms, and only one in
    INVALID_EVERY operations gets invalid data, which takes hypothesis longest to generate.

    Raises the errors of failed checks. `cases` then contains the calls made so far.
    """
    by_guard = {
        True: schemathesis.openapi.from_dict(dict(document), config=_config(url, keys[0])),
        False: schemathesis.openapi.from_dict(_without_security(document), config=_config(url)),
    }
    found = {is_guarded: [one.ok() for one in schema.get_all_operations()] for is_guarded, schema in by_guard.items()}
    each = num_calls / len(found[True]) / (CALLS_EACH if is_thorough else 1)
    cases = Cases() if cases is None else cases
    with requests.Session() as session:
        session.trust_env = False
        for at, path in enumerate(one.path for one in found[True]):
            names = known(path)
            for kind in KINDS:
                # A short run has only enough cases for calls that pass authentication.
                num_cases = max(round(each * kind.share), 0 if kind.is_guarded else 1)
                operation = found[kind.is_guarded][at]
                has_turn = is_thorough or kind.mode.is_positive or at % INVALID_EVERY == 0
                is_possible = kind.is_guarded or kind.mode.is_positive or _can_be_wrong(document, operation)
                if num_cases > 0 and has_turn and is_possible:
                    with_keys = () if kind.is_guarded else keys
                    visitor = _Visitor(operation, session, names, with_keys, is_thorough, cases)
                    visitor.visit(kind.mode, num_cases, number)
    return cases


@dataclass(frozen=True, slots=True)
class _Visitor:
    """Calls an operation with the given keys. Without keys, calls use the key in the generated data."""

    operation: Any
    session: requests.Session
    known: Mapping[str, Any]
    keys: Sequence[str]
    is_thorough: bool
    cases: Cases

    def visit(self, mode: GenerationMode, num_cases: int, number: int) -> None:
        @seed(number)
        @settings(
            max_examples=num_cases,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        @given(
            case=self.operation.as_strategy(generation_mode=mode),
            other=st.sampled_from(self.keys[1:]) if self.keys else st.none(),
        )
        def call(case: Any, other: str | None) -> None:
            way = None if self.is_thorough else self.cases.num_generated % CALLS_EACH
            self.cases.num_generated += 1
            first = self.keys[0] if self.keys else None
            if way in (None, 0):
                self._call(case, first)
            if (self._name_what_exists(case) and way is None) or way == 1:
                self._call(case, first)
            if (other is not None and way is None) or way == 2:
                self._call(case, other)

        # No invalid data exists for an operation without parameters.
        with suppress(Unsatisfiable):
            call()

    def _name_what_exists(self, case: Any) -> bool:
        """Replace names in a case with names of existing objects, and return whether any name was replaced.

        Parts generated as invalid are left alone, because the checks expect the server to refuse them.
        """
        is_changed = False
        for location, place in (
            (ParameterLocation.PATH, case.path_parameters),
            (ParameterLocation.QUERY, case.query),
            (ParameterLocation.BODY, case.body),
        ):
            if not isinstance(place, dict) or case.meta.is_negative_at(location):
                continue
            for name in self.known.keys() & place.keys():
                place[name] = self.known[name]
                is_changed = True
        return is_changed

    def _call(self, case: Any, key: str | None) -> None:
        headers = None if key is None else {"authorization": f"Bearer {key}"}
        response = case.call(session=self.session, headers=headers, timeout=60)
        self.cases.statuses[response.status_code] += 1
        case.validate_response(response)


def _config(url: str, key: str | None = None) -> SchemathesisConfig:
    return SchemathesisConfig.from_dict(
        {
            "base-url": url,
            "auth": {} if key is None else {"openapi": {"key": {"bearer": key}}},
            "checks": {"positive_data_acceptance": {"expected-statuses": [str(one) for one in MEANT_OTHERWISE]}},
        }
    )


def _can_be_wrong(document: Mapping[str, Any], operation: Any) -> bool:
    """Return whether invalid data exists for an operation. Hypothesis needs seconds to find that none exists."""
    described = document["paths"][operation.path][operation.method]
    if "application/json" in described.get("requestBody", {}).get("content", {}):
        return True
    for parameter in described.get("parameters", ()):
        is_any_text = parameter["schema"].keys() <= {"type", "title"} and parameter["schema"].get("type") == "string"
        if parameter["in"] != "path" or not is_any_text:
            return True
    return False


def _without_security(document: Mapping[str, Any]) -> dict[str, Any]:
    bare = copy.deepcopy(dict(document))
    bare["components"].pop("securitySchemes")
    for item in bare["paths"].values():
        for operation in item.values():
            operation.pop("security", None)
    return bare
