from __future__ import annotations

import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parents[2] / "docs" / "demo.svg"


def main() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "loramux.admin.cli", "demo", "--exit", *sys.argv[1:]],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    width = max(len(line) for line in printed.splitlines()) + 1
    console = Console(record=True, width=width, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi("$ make demo", style="bold"))
    for line in printed.splitlines():
        if line.startswith("It adds up"):
            style = "bold green"
        elif line.endswith("token") or line.startswith(("  tenant", "One batch", "Usage report")):
            style = "bold"
        elif line.startswith(" ─"):
            style = "dim"
        else:
            style = ""
        console.print(Text(line, style=style))
    drawn = console.export_svg(title="loramux", unique_id="demo")
    # Use the reader's own monospaced font, because a picture should not download a font.
    PICTURE.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))
    print(f"wrote {PICTURE.name}")


if __name__ == "__main__":
    main()
