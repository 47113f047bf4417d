"""`loramux pull`: fetch a base model from a hub or a bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from loramux.admin.commands.options import AsJson, ConfigFile, DataDir
from loramux.admin.commands.output import error_document, fail, print_json, print_text, tell
from loramux.admin.exit_codes import REFUSED

if TYPE_CHECKING:
    from loramux.adapter_store.pulling.pull import PullPlan


def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="OWNER/NAME[@REVISION]|URL",
            help="A repository of the hub, hf://OWNER/NAME/FILE.gguf, or s3://BUCKET/PREFIX.",
        ),
    ],
    config: ConfigFile = None,
    data_dir: DataDir = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show which files would be fetched.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch a base model from a Hugging Face hub or a bucket, so that it can be served without a network.

    Only the files that a server reads are fetched. Each is verified by the hash that the source declares. A pull that
    was interrupted continues where it stopped. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE work as in other tools. Pull
    again to get a revision's newest commit.
    """
    from loramux.adapter_store.errors import Refused, SourceUnavailable
    from loramux.adapter_store.pulling.model_name import ModelName
    from loramux.adapter_store.pulling.pull import Puller
    from loramux.admin.commands.local.model_argument import model_document, model_settings
    from loramux.admin.server.data_directory import make_private
    from loramux.admin.server.pulled_model import failure_of, plan_lines, pull_shown

    settings = model_settings(config, data_dir, as_json)
    try:
        name = ModelName.parse(model)
        puller = Puller(settings.pulls)
        found = puller.cache.find(name) if puller.settings.is_offline else None
        if found is not None:
            tell(model_document(found), f"{name.url} is {found.path}; offline, the hub is not asked", as_json)
            return
        plan = puller.plan(name)
        if not as_json:
            print_text("\n".join(plan_lines(plan)), flush=True)
        if dry_run:
            if as_json:
                print_json(_document(plan))
            return
        make_private(settings.data_dir)
        pulled = pull_shown(puller, plan)
    except (Refused, SourceUnavailable) as error:
        message = failure_of(error)
        code = error.code if isinstance(error, Refused) else "source_unavailable"
        fail(message, REFUSED, error_document(message, code, getattr(error, "param", None)) if as_json else None)
    except OSError as error:
        message = f"{settings.data_dir} cannot be used: {error.strerror}"
        fail(message, REFUSED, error_document(message, "directory_not_usable") if as_json else None)
    if as_json:
        print_json({**_document(plan), "path": str(pulled.path)})
        return
    data = "" if data_dir is None else f" --data-dir {data_dir}"
    print_text(f"{name.url} is {pulled.path}\nserve it without a network: loramux serve --model {name.url}{data}")


def _document(plan: PullPlan) -> dict[str, object]:
    return {
        "object": "pull",
        "model": plan.name.url,
        "commit": plan.commit,
        "directory": str(plan.directory),
        "num_bytes": plan.num_bytes,
        "missing_bytes": plan.missing_bytes,
        "files": [
            {
                "name": file.name,
                "size": file.size,
                "digest": None if file.digest is None else f"{file.digest.algorithm}:{file.digest.value}",
            }
            for file in plan.files
        ],
    }
