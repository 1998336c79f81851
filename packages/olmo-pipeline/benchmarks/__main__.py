"""Bubble and peak of every schedule beside the published formulas: a table and two pictures.

`python packages/olmo-pipeline/benchmarks [FOLDER]` from the root of the repository; it needs no GPU
and no torch, and takes some minutes. It writes `table.csv`, `summary.md`, `bubble.svg`, `peak.svg`
and `search.md` (what the search finds, and what is proved of it) into FOLDER, by default
`reports/` beside this file.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent / "src"))

from measure import measure_all  # noqa: E402
from report import write_report  # noqa: E402
from searches import PROBLEMS, measure, page  # noqa: E402

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "reports"
    folder.mkdir(parents=True, exist_ok=True)
    write_report(measure_all(), folder)
    (folder / "search.md").write_text(page(measure(PROBLEMS)), encoding="utf-8")
    print(f"wrote {folder}")
