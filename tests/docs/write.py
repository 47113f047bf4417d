from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.docs.architecture_picture import architecture_picture
from tests.docs.commands_page import commands_page
from tests.docs.configuration_page import configuration_page
from tests.docs.endpoints_page import endpoints_page
from tests.docs.json_schema_page import json_schema_page
from tests.docs.models_page import models_page
from tests.docs.request_fields_page import request_fields_page
from tests.reliability.table import reliability_page

DOCS = Path(__file__).parents[2] / "docs"
PAGES: Mapping[str, Callable[[], str]] = {
    "architecture.svg": architecture_picture,
    "commands.md": commands_page,
    "configuration.md": configuration_page,
    "endpoints.md": endpoints_page,
    "json-schema.md": json_schema_page,
    "models.md": models_page,
    "reliability.md": reliability_page,
    "request-fields.md": request_fields_page,
}


def main() -> None:
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
