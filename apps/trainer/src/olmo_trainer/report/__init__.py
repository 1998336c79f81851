"""The HTML reports: `history.py` numbers, `pictures.py` drawings, `page.py`, `costs.py` the page.

`of_run.py` makes the report of a run's folder, `compare.py` one page of several runs.
"""

from olmo_trainer.report.page import write_report as write_report

__all__ = ["write_report"]
