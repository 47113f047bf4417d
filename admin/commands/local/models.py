"""`loramux models`: the base models that have been pulled to this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from loramux.admin.commands.options import AsJson, ConfigFile, DataDir
from loramux.admin.commands.output import error_document, fail, print_json, print_table, shown_time, tell
from loramux.admin.exit_codes import REFUSED

app = typer.Typer(no_args_is_help=True, help="List and remove pulled base models.")


@app.command("list")
def list_models(config: ConfigFile = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the base models that have been pulled."""
    from loramux.adapter_store.errors import PullRefused
    from loramux.adapter_store.pulling.model_cache import ModelCache
    from loramux.admin.commands.local.model_argument import model_document, model_settings
    from loramux.admin.server.pulled_model import shown_bytes

    try:
        models = ModelCache(model_settings(config, data_dir, as_json).pulls.models_dir).models()
    except PullRefused as error:
        fail(error.message, REFUSED, error_document(error.message, error.code) if as_json else None)
    if as_json:
        print_json({"object": "list", "data": [model_document(model) for model in models]})
        return
    rows = [
        (model.name.url, " ".join(model.revisions), shown_bytes(model.num_bytes), shown_time(model.record.pulled_s))
        for model in models
    ]
    print_table(("model", "revisions", "size", "pulled"), rows)


@app.command("rm")
def remove(
    model: Annotated[str, typer.Argument(metavar="OWNER/NAME[@REVISION]|URL", help="The model's name.")],
    config: ConfigFile = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove a pulled base model, and what interrupted pulls of its repository have left."""
    from loramux.adapter_store.errors import PullRefused
    from loramux.adapter_store.pulling.model_cache import ModelCache
    from loramux.adapter_store.pulling.model_name import ModelName
    from loramux.admin.commands.local.model_argument import model_settings
    from loramux.admin.server.pulled_model import shown_bytes

    try:
        name = ModelName.parse(model)
        num_bytes = ModelCache(model_settings(config, data_dir, as_json).pulls.models_dir).remove(name)
    except PullRefused as error:
        fail(error.message, REFUSED, error_document(error.message, error.code, error.param) if as_json else None)
    document = {"object": "removed_model", "model": name.url, "num_bytes": num_bytes}
    tell(document, f"removed {name.url}: {shown_bytes(num_bytes)}", as_json)
