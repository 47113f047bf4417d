"""`/costs`: the cost of usage."""

from __future__ import annotations

from fastapi import APIRouter, Response

from loramux.admin.rest.access import Reader, Services
from loramux.admin.rest.listing import Document
from loramux.admin.rest.usage.usage_documents import CostsPage
from loramux.admin.rest.usage.usage_query import Report, report_response
from loramux.platform.amounts import decimal
from loramux.platform.ledger.report import UsageRow
from loramux.platform.requests.openapi import answers_rows

router = APIRouter(prefix="/costs", tags=["usage"])


@router.get("", responses=answers_rows(CostsPage))
async def get_costs(services: Services, caller: Reader, wanted: Report) -> Response:
    """Report the cost of requests that finished in [start, end), at the prices in force when each request was admitted.

    `amount_nanos` is exact, in billionths of the currency. `amount` is the same value as a decimal string. The
    currency is null if there are no prices.
    """
    currency = await services.call(services.usage.prices.currency)

    def describe(row: UsageRow) -> Document:
        return {
            "object": "costs.result",
            "requests": row.requests,
            "amount_nanos": row.cost_nanos,
            "amount": decimal(row.cost_nanos),
            "currency": currency,
        }

    columns = ("requests", "amount_nanos", "amount", "currency")
    return await report_response(services, caller, "costs", wanted, describe, columns, {"currency": currency})
