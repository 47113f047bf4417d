from __future__ import annotations

import inspect
import re

from benchmarks.cluster.handle_engine import HandleMember
from loramux.admin.serving import serve


def test_a_server_finds_all_that_it_reads_of_its_engine() -> None:
    """The benchmark puts HandleMember in the place of an engine, where no type checker looks."""
    read = set(re.findall(r"\bengine\.([a-z_]+)", inspect.getsource(serve._serve)))
    # Only of an engine of its own.
    read.remove("socket_path")
    member = HandleMember("127.0.0.1:1", is_multiplexed=False)
    assert [name for name in sorted(read) if not hasattr(member, name)] == []
