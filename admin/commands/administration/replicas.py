"""`loramux replicas`: the servers that share requests, or the engines of a server."""

from __future__ import annotations

from loramux.admin.commands.administration.bases import NUM_SHOWN
from loramux.admin.commands.options import AsJson
from loramux.admin.commands.output import connected, print_json, print_table, print_text


def replicas(as_json: AsJson = False) -> None:
    """Show the servers that share requests, or the engines of a server with several, with their base, load, memory and
    adapters.
    """
    with connected(as_json) as client:
        document = client.get("replicas")
    if as_json:
        print_json(document)
        return
    if not document["data"]:
        print_text(
            "this server has one engine and does not share requests with others: see --data-parallel-size and "
            "--peer-address of 'loramux serve'"
        )
        return
    print_table(
        ("server", "address", "base", "state", "running", "waiting", "capacity", "free pages", "pages", "adapters"),
        [
            (
                f"{one['id']} (this server)" if one["is_own"] else one["id"],
                one["address"],
                (one["base_id"] or "unknown")[:NUM_SHOWN],
                one["state"],
                one["num_running"],
                one["num_waiting"],
                one["capacity"],
                one["num_free_pages"],
                one["num_pages"],
                one["num_adapters"],
            )
            for one in document["data"]
        ],
    )
    for one in document["data"]:
        if one["reason"] is not None:
            print_text(f"{one['id']} is {one['state']}: {one['reason']}")
