"""Random calls to a listener, generated from its OpenAPI document, with every check of schemathesis."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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

# A well-formed call can still request something impossible, such as another tenant's name or a long prompt.
MEANT_OTHERWISE = [*range(200, 300), 400, 401, 403, 404, 409, 412, 413, 422, 429]

Known = Callable[[str], Mapping[str, Any]]
"""The names of existing objects by parameter, for an operation with this path."""


@dataclass(slots=True)
class Cases:
    """The number of generated cases, and the statuses of their answers."""

    num_generated: int = 0
    statuses: Counter[int] = field(default_factory=Counter)

    @property
    def num_calls(self) -> int:
        return self.statuses.total()


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of test data, and its share of all data.

    Where the document requires a key, invalid data is mostly an invalid key, which is refused before anything else is
    checked. So most data is generated from a document without that requirement and sent with valid keys.
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
"""Number of times that a campaign sends each case, because data takes far longer to generate than to send."""


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
    """Call every operation, about `num_calls` times in all, with data that the document allows or forbids.

    Each case is sent unchanged, then with `known` names filled in, and then again with another of the `keys`, the first
    of which has the most rights. Unless `is_thorough`, each case is sent in only one of these forms. Raises the checks'
    errors; `cases` then contains the calls made so far.
    """
    by_guard = {
        True: schemathesis.openapi.from_dict(dict(document), config=_config(url, keys[0])),
        False: schemathesis.openapi.from_dict(_without_security(document), config=_config(url)),
    }
    found = {is_guarded: [one.ok() for one in schema.get_all_operations()] for is_guarded, schema in by_guard.items()}
    each = num_calls / len(found[True]) / (CALLS_EACH if is_thorough else 1)
    cases = Cases() if cases is None else cases
    with requests.Session() as session, _few_collections():
        session.trust_env = False
        for at, path in enumerate(one.path for one in found[True]):
            names = known(path)
            for kind in KINDS:
                # A short run spends its few cases on calls that pass authentication.
                num_cases = max(round(each * kind.share), 0 if kind.is_guarded else 1)
                operation = found[kind.is_guarded][at]
                is_possible = kind.is_guarded or kind.mode.is_positive or _can_be_wrong(document, operation)
                if num_cases > 0 and is_possible:
                    with_keys = () if kind.is_guarded else keys
                    visitor = _Visitor(operation, session, names, with_keys, is_thorough, cases)
                    visitor.visit(kind.mode, num_cases, number)
    return cases


@dataclass(frozen=True, slots=True)
class _Visitor:
    """Calls one operation with `keys`, or with the key in the generated data if there are none."""

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

        # An operation without parameters cannot be called wrongly.
        with suppress(Unsatisfiable):
            call()

    def _name_what_exists(self, case: Any) -> bool:
        """Replace names in a case with existing ones and return whether any were replaced.

        Deliberately invalid parts are kept, because the checks expect their refusal.
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
    """Whether any data can violate the document; hypothesis takes seconds to find out that none can."""
    described = document["paths"][operation.path][operation.method]
    if "application/json" in described.get("requestBody", {}).get("content", {}):
        return True
    for parameter in described.get("parameters", ()):
        is_any_text = parameter["schema"].keys() <= {"type", "title"} and parameter["schema"].get("type") == "string"
        if parameter["in"] != "path" or not is_any_text:
            return True
    return False


def _without_security(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document, changed as if the server required no key."""
    bare = copy.deepcopy(dict(document))
    bare["components"].pop("securitySchemes")
    for item in bare["paths"].values():
        for operation in item.values():
            operation.pop("security", None)
    return bare


@contextmanager
def _few_collections() -> Iterator[None]:
    """Collect garbage rarely; scanning the heap with all imported modules takes a fifth of the time."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
