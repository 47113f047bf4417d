"""`/adapters/{id}/evals` and `/evals`: run a version on a file of prompts, and read the graded answers."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field
from typing_extensions import TypedDict

from loramux.adapter_store.registry.evals import PPM, Eval, EvalAnswer, EvalState, NewEval
from loramux.adapter_store.registry.records import Adapter
from loramux.adapter_store.registry.registry import MAX_VERSION
from loramux.admin.rest.access import Caller, Developer, Reader, Services
from loramux.admin.rest.adapters.adapters import find_adapter
from loramux.admin.rest.adapters.versions import Number
from loramux.admin.rest.bodies import MAX_EVAL_BYTES, EvalRun, body_of, takes_up_to
from loramux.admin.rest.listing import (
    ListDocument,
    Paging,
    check_identifier,
    list_document,
    paged,
    seconds,
    whole_list,
)
from loramux.admin.rest.services import AdminServices
from loramux.platform.accounts.keys import ApiKey
from loramux.platform.accounts.model_names import ModelResolver
from loramux.platform.bodies.request_body import parse_body
from loramux.platform.errors import InvalidRequest, NotFound, PermissionDenied
from loramux.platform.evals.cases import CaseFile, check_lengths, read_cases
from loramux.platform.evals.payer import payer
from loramux.platform.requests.openapi import errors, takes

router = APIRouter(tags=["evals"])


class EvalError(TypedDict):
    """Why an eval failed."""

    code: str
    message: str


class EvalDocument(TypedDict):
    """One run of a version on a file. Scores are from 0 to 1, and null until the eval is `done`.

    `name` is the file's name, or one made from its checksum if the name could be a secret. `sha256` is the checksum of
    the file's lines, without empty lines and spaces around lines. `num_answers` counts the
    answers so far, of both versions. `charged` says whether the answers are the tenant's use. `error` says why the eval
    failed. With `share_base_cache`, the fields `compare_score` and `compare_num_passed` are those of the version with
    this option, and `divergence` is the mean KL divergence that the option causes, in nats per token, over the
    `num_measured` lines on which it could be measured.
    """

    id: str
    object: Literal["eval"]
    adapter_id: str
    model: str
    version: int
    compare: int | None
    name: str
    sha256: str
    judge: str | None
    state: EvalState
    charged: bool
    num_cases: int
    num_answers: int
    score: float | None
    num_passed: int | None
    compare_score: float | None
    compare_num_passed: int | None
    share_base_cache: int | None
    divergence: float | None
    num_measured: int | None
    error: EvalError | None
    created_by: str
    created_at: int
    finished_at: int | None


class EvalAnswerDocument(TypedDict):
    """The graded answer of one version to one line of the file. Long answers are cut.

    With `share_base_cache`, the answers with this option have `shared` set, and `divergence` is theirs, in nats per
    token. If it could not be measured, `detail` says why.
    """

    object: Literal["eval_answer"]
    line: int
    version: int
    score: float
    passed: bool
    answer: str
    detail: str
    shared: bool
    divergence: float | None


@router.post(
    "/adapters/{adapter_id}/versions/{number}/evals",
    status_code=201,
    openapi_extra=takes(EvalRun),
    responses=errors(409, 429),
)
@takes_up_to(MAX_EVAL_BYTES)
async def create_eval(
    adapter_id: str, number: Number, request: Request, services: Services, caller: Developer
) -> EvalDocument:
    """Queue an eval: a version answers a file of prompts, and its answers are graded. Poll the eval until it ends.

    The questions run behind all other requests. They are the tenant's use, with the limits of the caller's key, unless
    the operator starts the eval: the operator's evals are not charged. If the server stops, the eval continues after
    its last stored answer.
    """
    adapter = await find_adapter(services, caller, adapter_id)
    async with services.slots.uploads.held_slot(adapter.tenant_id):
        sent = await body_of(request)
        body = await services.call(parse_body, sent, EvalRun)
        content = body.file.encode()
        file = await services.call(read_cases, content)
        check_lengths(file)
    key = await _paying_key(services, caller)
    judge = body.judge if file.needs_judge else None
    await services.call(_check_judge, services, adapter, key, judge, file)
    new = NewEval(
        name=body.name,
        sha256=file.sha256,
        content=content,
        num_cases=len(file.cases),
        judge=judge,
        compared=body.compare,
        share_base_cache=body.share_base_cache,
        api_key_id=None if key is None else key.id,
        created_by=caller.principal.key_id,
    )
    return describe_eval(await services.call(services.adapters.evals.create, adapter.id, number, new))


@router.get("/adapters/{adapter_id}/evals")
@paged
async def list_evals(
    adapter_id: str,
    services: Services,
    caller: Reader,
    paging: Paging,
    version: Annotated[int | None, Query(ge=1, le=MAX_VERSION, description="Only evals of this version.")] = None,
    newest_of: Annotated[
        list[Annotated[int, Field(ge=1, le=MAX_VERSION)]] | None,
        Query(max_length=100, description="Only the newest finished eval of each of these versions, on one page."),
    ] = None,
) -> ListDocument[EvalDocument]:
    """List the evals of an adapter's versions. Of each version, the newest 20 finished evals are kept."""
    adapter = await find_adapter(services, caller, adapter_id)
    if newest_of:
        if version is not None or paging.after is not None or paging.before is not None:
            raise InvalidRequest("newest_of cannot be combined with version, after or before", param="newest_of")
        page = await services.call(services.adapters.evals.newest, adapter.id, newest_of)
    else:
        page = await services.call(services.adapters.evals.list, adapter.id, version, *paging)
    return list_document(page, describe_eval)


@router.get("/evals/{eval_id}")
async def get_eval(eval_id: str, services: Services, caller: Reader) -> EvalDocument:
    """Get one eval with its progress and, once it is done, its scores."""
    return describe_eval(await _find_eval(services, caller, eval_id))


@router.get("/evals/{eval_id}/answers")
async def list_eval_answers(
    eval_id: str,
    services: Services,
    caller: Reader,
    after_line: Annotated[int, Query(ge=0, le=MAX_VERSION, description="Start after this line.")] = 0,
    limit: Annotated[int, Query(ge=1, le=100, description="Lines per page.")] = 100,
) -> ListDocument[EvalAnswerDocument]:
    """List the graded answers by line. If two versions are compared, their answers to a line follow each other."""
    found = await _find_eval(services, caller, eval_id)
    answers, has_more = await services.call(services.adapters.evals.answers, found.id, limit, after_line)
    return whole_list([_describe_answer(found, answer) for answer in answers], has_more)


@router.post("/evals/{eval_id}/cancel")
async def cancel_eval(eval_id: str, services: Services, caller: Developer) -> EvalDocument:
    """Cancel an eval that is queued or running. Its answers so far are kept. A finished eval does not change."""
    found = await _find_eval(services, caller, eval_id)
    return describe_eval(await services.call(services.adapters.evals.cancel, found.id))


async def _find_eval(services: AdminServices, caller: Caller, eval_id: str) -> Eval:
    """Raises the same NotFound whether the eval is hidden or missing."""
    found = await services.call(services.adapters.evals.get, check_identifier(eval_id, "eval"))
    if not caller.may_see_adapter(found.tenant_id, found.adapter_id):
        raise NotFound("there is no such eval", code="eval_not_found")
    return found


async def _paying_key(services: AdminServices, caller: Caller) -> ApiKey | None:
    """Return the tenant's key that pays, or None for an operator. Raises PermissionDenied."""
    if caller.principal.tenant_id is None:
        return None
    key = await services.call(services.accounts.api_keys.get, caller.principal.key_id)
    if key is None:
        raise PermissionDenied("an eval is charged to a key: start it with a key, not with single sign-on")
    return key


def _check_judge(
    services: AdminServices, adapter: Adapter, key: ApiKey | None, judge: str | None, file: CaseFile
) -> None:
    """Raise InvalidRequest if there is no judge for lines that need one, or ModelNotFound if it may not be called."""
    if not file.needs_judge:
        return
    if judge is None:
        raise InvalidRequest("lines of the file need a judge", param="judge", code="missing_required_parameter")
    principal = payer(adapter.tenant_id, adapter.tenant_slug, key, services.database.now_us())
    ModelResolver(services.adapters.registry, services.engine.self_check.served_name).resolve(principal, judge)


def describe_eval(found: Eval) -> EvalDocument:
    return {
        "id": found.id,
        "object": "eval",
        "adapter_id": found.adapter_id,
        "model": f"{found.tenant_slug}/{found.adapter_name}",
        "version": found.version,
        "compare": None if found.share_base_cache is not None else found.compared,
        "name": found.name,
        "sha256": found.sha256,
        "judge": found.judge,
        "state": found.state,
        "charged": found.api_key_id is not None,
        "num_cases": found.num_cases,
        "num_answers": found.num_answers,
        "score": _score(found.score_ppm),
        "num_passed": found.num_passed,
        "compare_score": _score(found.compared_ppm),
        "compare_num_passed": found.compared_passed,
        "share_base_cache": found.share_base_cache,
        "divergence": _score(found.divergence_ppm),
        "num_measured": found.num_measured,
        "error": None if found.error_code is None else {"code": found.error_code, "message": found.error or ""},
        "created_by": found.created_by,
        "created_at": seconds(found.created_us),
        "finished_at": seconds(found.finished_us),
    }


def _describe_answer(found: Eval, answer: EvalAnswer) -> EvalAnswerDocument:
    return {
        "object": "eval_answer",
        "line": answer.line,
        "version": found.compared if answer.side and found.compared is not None else found.version,
        "score": answer.score_ppm / PPM,
        "passed": answer.is_passed,
        "answer": answer.answer,
        "detail": answer.detail,
        "shared": found.shared(answer.side) is not None,
        "divergence": _score(answer.divergence_ppm),
    }


def _score(ppm: int | None) -> float | None:
    return None if ppm is None else ppm / PPM
