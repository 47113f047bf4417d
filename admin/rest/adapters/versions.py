"""`/adapters/{id}/versions`: create versions from uploads, read them, and take them out of service."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request
from typing_extensions import TypedDict

from loramux.adapter_store.registry.records import AdapterVersion, VersionState
from loramux.adapter_store.registry.registry import MAX_VERSION
from loramux.admin.rest import purging
from loramux.admin.rest.access import Developer, PlatformAdmin, Reader, Services, Writer
from loramux.admin.rest.adapters.adapters import find_adapter
from loramux.admin.rest.adapters.uploads import find_upload
from loramux.admin.rest.adapters.warm_and_drain import drain
from loramux.admin.rest.bodies import NewVersion, PurgeRequest, read_json
from loramux.admin.rest.listing import ListDocument, Paging, list_document, paged, seconds
from loramux.admin.rest.purging import PurgeDocument
from loramux.admin.rest.services import AdminServices
from loramux.platform.errors import InvalidRequest, NotFound, PermissionDenied
from loramux.platform.requests.openapi import errors, takes

router = APIRouter(prefix="/adapters/{adapter_id}/versions", tags=["versions"])

Number = Annotated[int, Path(ge=1, le=MAX_VERSION)]


class VersionDocument(TypedDict):
    """One immutable set of weights with its optional files. `error` is the reason for a rejection.

    `digest` is the digest of the weights. A model name can contain `version_digest`, which also covers the optional
    files, after `@sha256:`. `chat_template` is the SHA-256 of the version's own template. `generation_config` contains
    its sampling defaults and end tokens. `tool_call_parser` and `reasoning_parser` are the parsers uploaded with it.
    `added_tokens` contains the id of each token that the version adds to the base's vocabulary, or is null if it adds
    none. `invocation_tokens` lists the token ids that activate an activated LoRA, or is null if the adapter is always
    active. `task` is what the version is for: `classification`, with its labels, or `embedding`. It is null for
    generation. `report` is the validation report. The digests and sizes are null until validation succeeds.
    """

    id: str
    object: Literal["adapter_version"]
    adapter_id: str
    number: int
    state: VersionState
    digest: str | None
    version_digest: str | None
    chat_template: str | None
    generation_config: dict[str, Any] | None
    tool_call_parser: str | None
    reasoning_parser: str | None
    added_tokens: dict[str, int] | None
    max_rank: int | None
    invocation_tokens: list[int] | None
    task: dict[str, Any] | None
    num_pages: int | None
    size: int | None
    pinned: bool
    report: dict[str, Any]
    error: dict[str, Any] | None
    created_at: int
    ready_at: int | None


class WithdrawnVersion(VersionDocument):
    """A version taken out of service. `drained` means that no request is still running on the version."""

    drained: bool


@router.post("", status_code=202, openapi_extra=takes(NewVersion), responses=errors(429))
async def create_version(adapter_id: str, request: Request, services: Services, caller: Developer) -> VersionDocument:
    """Create a version from an upload. Poll the version until it is `ready` or `rejected`.

    If a version with the same bytes exists and was not rejected, that version is returned. A platform administrator
    can instead specify a `source` that the operator allows: `s3://BUCKET/PREFIX`, `file:///DIRECTORY` of the
    server's machine, or `hf://OWNER/NAME@REVISION` of a Hugging Face hub. The revision's commit is recorded. A
    version from a source is rejected if the revision moves before the files are fetched, or if another version has
    the same bytes.
    """
    adapter = await find_adapter(services, caller, adapter_id)
    body = await read_json(request, NewVersion)
    if body.upload_id is None and body.source is None:
        raise InvalidRequest("upload_id is required", param="upload_id", code="missing_required_parameter")
    if body.upload_id is not None and body.source is not None:
        raise InvalidRequest("specify either upload_id or source", param="source")
    if body.source is not None:
        if not caller.principal.is_platform_admin:
            raise PermissionDenied("only a platform administrator may specify a source", param="source")
        return describe_version(
            await services.call(services.adapters.ingest.create_version_from, adapter.id, body.source)
        )
    assert body.upload_id is not None
    upload = await find_upload(services, adapter, body.upload_id)
    return describe_version(await services.call(services.adapters.ingest.create_version, adapter.id, upload.id))


@router.get("")
@paged
async def list_versions(
    adapter_id: str, services: Services, caller: Reader, paging: Paging
) -> ListDocument[VersionDocument]:
    """List an adapter's versions."""
    adapter = await find_adapter(services, caller, adapter_id)
    page = await services.call(services.adapters.registry.list_versions, adapter.id, *paging)
    return list_document(page, describe_version)


@router.get("/{number}")
async def get_version(adapter_id: str, number: Number, services: Services, caller: Reader) -> VersionDocument:
    """Get one version with its state and validation report."""
    adapter = await find_adapter(services, caller, adapter_id)
    return describe_version(await services.call(services.adapters.registry.find_version, adapter.id, number))


@router.post("/{number}/archive")
async def archive_version(adapter_id: str, number: Number, services: Services, caller: Writer) -> WithdrawnVersion:
    """Take a version out of service. The call is refused while an alias points at the version. Running requests finish.
    `restore` undoes the call.
    """
    adapter = await find_adapter(services, caller, adapter_id)
    return await _withdraw(services, await services.call(services.adapters.version_states.archive, adapter.id, number))


@router.post("/{number}/quarantine")
async def quarantine_version(
    adapter_id: str, number: Number, services: Services, caller: PlatformAdmin
) -> WithdrawnVersion:
    """Take a version out of service immediately, even if aliases point at it. The aliases keep their other versions."""
    adapter = await find_adapter(services, caller, adapter_id)
    return await _withdraw(
        services, await services.call(services.adapters.version_states.quarantine, adapter.id, number)
    )


@router.post("/{number}/restore")
async def restore_version(adapter_id: str, number: Number, services: Services, caller: Writer) -> VersionDocument:
    """Put an archived version back into service. Only a platform administrator can restore a quarantined version."""
    adapter = await find_adapter(services, caller, adapter_id)
    states: tuple[VersionState, ...] = ("archived",)
    if caller.principal.is_platform_admin:
        states = ("archived", "quarantined")
    return describe_version(await services.call(services.adapters.version_states.restore, adapter.id, number, states))


@router.post("/{number}/purge", openapi_extra=takes(PurgeRequest), responses=errors(409))
async def purge_version(
    adapter_id: str, number: Number, request: Request, services: Services, caller: PlatformAdmin
) -> PurgeDocument:
    """Purge a version that no alias points at: its files, its rows and its cached copies. This cannot be undone.

    Running requests finish. The number is never used again, the ledger keeps the version's usage, and the audit log
    keeps who purged it.
    """
    adapter = await find_adapter(services, caller, adapter_id)
    version = await services.call(services.adapters.registry.get_version, adapter.id, number)
    if version is None:
        raise NotFound("there is no such version", code="version_not_found")
    return await purging.purge_version(services, adapter, version, await read_json(request, PurgeRequest))


async def _withdraw(services: AdminServices, version: AdapterVersion) -> WithdrawnVersion:
    return {**describe_version(version), "drained": await drain(services, version.adapter_id, version.number)}


def describe_version(version: AdapterVersion) -> VersionDocument:
    return {
        "id": version.id,
        "object": "adapter_version",
        "adapter_id": version.adapter_id,
        "number": version.number,
        "state": version.state,
        "digest": version.digest,
        "version_digest": version.version_digest,
        "chat_template": version.report.get("chat_template", {}).get("sha256"),
        "generation_config": version.report.get("generation_config"),
        "tool_call_parser": version.report.get("parsers", {}).get("tool_call_parser"),
        "reasoning_parser": version.report.get("parsers", {}).get("reasoning_parser"),
        "added_tokens": version.report.get("added_vocabulary", {}).get("tokens"),
        "max_rank": version.max_rank,
        "invocation_tokens": None if version.invocation_tokens is None else list(version.invocation_tokens),
        "task": None if version.task is None else dict(version.task),
        "num_pages": version.num_pages,
        "size": version.canonical_bytes,
        "pinned": version.pinned_us is not None,
        "report": {name: value for name, value in version.report.items() if name != "error"},
        "error": version.report.get("error"),
        "created_at": seconds(version.created_us),
        "ready_at": seconds(version.ready_us),
    }
