"""`ETag` and `If-Match`: an update states which version of the object the caller last read.

    async def get_thing(..., response: Response) -> ThingDocument:
        return tagged(response, describe_thing(thing))

    async def change_thing(..., caller: Writer, if_match: IfMatch, response: Response) -> ThingDocument:
        changed = await services.call(services.things.update, ..., if_match.check_by(describe_thing))
        return tagged(response, describe_thing(changed))

The check runs in the transaction that makes the change, on the state that is about to be replaced.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Response

from loramux.platform.errors import InvalidRequest, PreconditionFailed, PreconditionRequired

T = TypeVar("T")
D = TypeVar("D", bound=Mapping[str, Any])
_TAGS = re.compile(r'\s*(W/)?"[\x21\x23-\x7e]{0,200}"\s*(,\s*(W/)?"[\x21\x23-\x7e]{0,200}"\s*){0,15}')
_TAG = re.compile(r'(?:W/)?"[^"]*"')


def etag_of(document: Mapping[str, Any]) -> str:
    """A document's ETag, which is a hash of its content."""
    encoded = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return f'"{hashlib.sha256(encoded).hexdigest()[:32]}"'


def tagged(response: Response, document: D) -> D:
    """Set the document's ETag on the response and return the document."""
    response.headers["etag"] = etag_of(document)
    return document


@dataclass(frozen=True, slots=True)
class Precondition:
    """The ETags that the caller accepts, or None if the caller accepts any state."""

    etags: frozenset[str] | None

    def check(self, document: Mapping[str, Any]) -> None:
        """Raise PreconditionFailed if the caller has not seen the document's current state."""
        if self.etags is not None and etag_of(document) not in self.etags:
            raise PreconditionFailed("the object has changed since you read it: read it again", param="If-Match")

    def check_by(self, describe: Callable[[T], Mapping[str, Any]]) -> Callable[[T], None]:
        """Return a callback with which a service checks a record before it changes the record."""
        return lambda record: self.check(describe(record))


async def required_precondition(
    if_match: Annotated[
        str | None, Header(alias="If-Match", description="The ETag that you read, or * for any state.")
    ] = None,
) -> Precondition:
    """Parse the header. Raises PreconditionRequired or InvalidRequest."""
    if if_match is None:
        raise PreconditionRequired("send If-Match with the ETag that you read", param="If-Match")
    if if_match.strip() == "*":
        return Precondition(None)
    if _TAGS.fullmatch(if_match) is None:
        raise InvalidRequest("If-Match must be an ETag in quotation marks, or *", param="If-Match")
    # A weak tag only says that two states are equivalent. That is not enough for a change, so a weak tag never matches.
    return Precondition(frozenset(_TAG.findall(if_match)))


IfMatch = Annotated[Precondition, Depends(required_precondition)]
"""The parsed header. A route declares this parameter after the caller, so that a call without a key gets 401 first."""
