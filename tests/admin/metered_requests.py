from __future__ import annotations

from loramux.migrations.identifiers import new_id
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import ReservationRequest
from loramux.platform.ledger.settlement import Settlement
from tests.admin.admin_side import AdminSide


def begin_request(
    admin_side: AdminSide, tenant_id: str, key_id: str, model: str, prompt: int, completion: int = 16
) -> str:
    request_id = new_id("req")
    Admission(admin_side.services.database).reserve(
        ReservationRequest(
            request_id=request_id,
            tenant_id=tenant_id,
            api_key_id=key_id,
            model=model,
            adapter_version_id=None,
            endpoint="completions",
            prompt_tokens=prompt,
            reserved_tokens=prompt + completion,
        )
    )
    return request_id


def settle_request(
    admin_side: AdminSide, tenant_id: str, key_id: str, model: str, prompt: int, completion: int
) -> None:
    request_id = begin_request(admin_side, tenant_id, key_id, model, prompt, completion)
    settlement = Settlement(status="completed", prompt_tokens=prompt, completion_tokens=completion)
    Admission(admin_side.services.database).settle(request_id, settlement)
