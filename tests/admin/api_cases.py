"""Random calls of a listener by its OpenAPI document, with every check that schemathesis knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.config import SchemathesisConfig
from schemathesis.generation import GenerationMode

# A call may be well-formed and still ask for what cannot be: another's name, a prompt beyond the context.
MEANT_OTHERWISE = [*range(200, 300), 400, 401, 403, 404, 409, 412, 413, 422, 429]


@dataclass(slots=True)
class Cases:
    """What was called, and what was answered."""

    num_calls: int = 0
    statuses: Counter[int] = field(default_factory=Counter)


def call_all(
    document: Mapping[str, Any], url: str, key: str, known: Mapping[str, str], num_cases: int, number: int = 0
) -> Cases:
    """Call every operation `num_cases` times in all, half with data that the document allows, half with other.

    `known` are names that exist, which half of the calls use where they need one. Raises what a check finds.
    """
    schema = schemathesis.openapi.from_dict(dict(document), config=_config(url, key))
    found = [result.ok() for result in schema.get_all_operations()]
    each = max(1, num_cases // (2 * len(found)))
    cases = Cases()
    with requests.Session() as session:
        session.trust_env = False
        for operation in found:
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                _call(operation, mode, session, known, each, number, cases)
    return cases


def _call(
    operation: Any,
    mode: GenerationMode,
    session: requests.Session,
    known: Mapping[str, str],
    num_cases: int,
    number: int,
    cases: Cases,
) -> None:
    @seed(number)
    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), is_known=st.booleans())
    def call(case: Any, is_known: bool) -> None:
        if is_known:
            for place in (case.path_parameters, case.body if isinstance(case.body, dict) else None):
                for name in known.keys() & (place or {}).keys():
                    place[name] = known[name]
        cases.num_calls += 1
        response = case.call(session=session, timeout=60)
        cases.statuses[response.status_code] += 1
        case.validate_response(response)

    # An operation without any parameter cannot be called wrongly.
    with suppress(Unsatisfiable):
        call()


def _config(url: str, key: str) -> SchemathesisConfig:
    return SchemathesisConfig.from_dict(
        {
            "base-url": url,
            "auth": {"openapi": {"key": {"bearer": key}}},
            "checks": {"positive_data_acceptance": {"expected-statuses": [str(one) for one in MEANT_OTHERWISE]}},
        }
    )
