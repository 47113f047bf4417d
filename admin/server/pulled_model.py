"""Base models with a URL: pulled when a server starts, with a plan and a progress bar, or found again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loramux.adapter_store.errors import PullRefused, Refused, SourceUnavailable
from loramux.adapter_store.formats.files.file_names import TOKENIZER_FILE
from loramux.adapter_store.pulling.download import Progress
from loramux.adapter_store.pulling.model_cache import ModelCache, PulledModel, in_use
from loramux.adapter_store.pulling.model_name import ModelName, is_model_url
from loramux.adapter_store.pulling.pull import Puller, PullPlan
from loramux.admin.errors import StartRefused
from loramux.admin.server.data_directory import make_private
from loramux.admin.server.settings import ModelSettings, Settings
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.protocol.errors import EngineError


@contextmanager
def local_model(settings: Settings) -> Iterator[Settings]:
    """Pull the model unless it is here, and put its path in place of its URL. Raises StartRefused.

    In the `with` block, the model cannot be removed.
    """
    if isinstance(settings.model, Path):
        yield settings
        return
    name = settings.model
    try:
        puller = Puller(settings.pulls)
        found = puller.cache.find(name)
        if found is None:
            make_private(settings.data_dir)
            plan = puller.plan(name)
            print("\n".join(plan_lines(plan)), flush=True)
            found = pull_shown(puller, plan)
    except (Refused, SourceUnavailable) as error:
        raise StartRefused(failure_of(error)) from error
    except OSError as error:
        raise StartRefused(f"{settings.data_dir} cannot be used: {error.strerror}") from error
    print(f"the model {name.url} is {found.path}", flush=True)
    if found.may_lack_files:
        print(
            "an earlier release pulled it and may have left out small files, such as the pooling of an embedder: run "
            f"'loramux pull {found.name.url}' and start again",
            flush=True,
        )
    with in_use(found.directory):
        yield settings.with_pulled_model(found.path, found.name.url)


def local_path(model: str, settings: ModelSettings) -> Path:
    """Return the path of a model that is given by a path or a URL. Raises PullRefused unless it has been pulled."""
    if not is_model_url(model):
        return Path(model)
    name = ModelName.parse(model)
    found = ModelCache(settings.pulls.models_dir).find(name)
    if found is None:
        raise PullRefused("not_pulled", f"{name.url} has not been pulled: run 'loramux pull {name.url}' first", "model")
    return found.path


def plan_lines(plan: PullPlan) -> list[str]:
    """Say what a pull fetches, from where, how much it is, and where it ends up."""
    commit = f" (commit {plan.commit})" if plan.name.kind == "hf" else ""
    lines = [f"{plan.name.url}{commit}: {len(plan.files)} files, {shown_bytes(plan.num_bytes)}, to {plan.directory}"]
    lines += [f"  {shown_bytes(file.size):>10}  {file.name}" for file in plan.files]
    if plan.is_complete:
        lines.append("  all of them are here")
    elif plan.missing_bytes < plan.num_bytes:
        lines.append(f"  {shown_bytes(plan.missing_bytes)} are to be fetched; the rest is here")
    if any(file.digest is None for file in plan.files):
        lines.append("  the bucket keeps no hash of some files: only their sizes are checked")
    return lines


def pull_shown(puller: Puller, plan: PullPlan) -> PulledModel:
    """Pull a model with a progress bar, if standard error is a terminal."""
    with _progress(plan) as progress:
        return puller.carry_out(plan, progress, check_servable, _tell_of_wait)


def check_servable(directory: Path) -> None:
    """Refuse a model before its weights are fetched, if its small files tell that it cannot be served."""
    try:
        ModelConfig.load(directory)
    except EngineError as error:
        raise PullRefused("not_a_base", f"the model cannot be served: {error}", "model") from error
    if not (directory / TOKENIZER_FILE).exists():
        raise PullRefused("not_a_base", f"the model cannot be served: it has no {TOKENIZER_FILE}", "model")


def failure_of(error: Refused | SourceUnavailable) -> str:
    if isinstance(error, SourceUnavailable):
        return f"{error}: run the command again to continue"
    if error.code == "source_unauthorized":
        return f"{error.message}. Set HF_TOKEN to a token that may read it"
    return error.message


def shown_bytes(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"


@contextmanager
def _progress(plan: PullPlan) -> Iterator[Progress]:
    if not sys.stderr.isatty():
        yield lambda _name, _num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=plan.num_bytes, completed=plan.num_bytes - plan.missing_bytes)
        yield lambda name, num_bytes: bars.update(task, description=name.rpartition("/")[2], advance=num_bytes)


def _tell_of_wait() -> None:
    print("waiting for another process that pulls from the same repository", file=sys.stderr, flush=True)
