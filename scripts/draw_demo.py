"""Draw what `make demo` shows at its end as docs/demo.svg.

usage: python scripts/draw_demo.py
"""

from __future__ import annotations

import io
import re
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from quire import LLM
from quire.cli.generate import DEMO_PROMPTS, DEMO_SAMPLING
from quire.cli.inputs import text_jobs
from quire.cli.report import closing_rows
from quire.cli.views import Panels, ProgressBar

OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "demo.svg"


def main() -> None:
    """Complete the demo's prompts, and draw the last picture with the closing table under it."""
    jobs = text_jobs(DEMO_PROMPTS, DEMO_SAMPLING, chat=False)
    console = Console(record=True, width=96, height=34, file=io.StringIO(), force_terminal=True)
    panels = Panels(jobs, console, ProgressBar(jobs, console))
    with LLM("demo", threads=1) as llm:
        begun = time.monotonic()
        index_of = {llm.add_request(job.prompt, job.params): index for index, job in enumerate(jobs)}
        ended = []
        while not llm.idle:
            for output in llm.step():
                panels.take(index_of[output.request_id], output)
                ended += [output] if output.finished else []
        rows = closing_rows(ended, llm.stats, time.monotonic() - begun)
    console.print(panels.picture())
    table = Table(show_header=False, border_style="dim")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    svg = console.export_svg(title="make demo")
    OUTPUT.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), "utf-8")  # no fonts from elsewhere
    print(f"wrote {OUTPUT}")


if __name__ == "__main__":
    main()
