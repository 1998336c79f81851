"""The HTML report of a run: `history.py` numbers, `pictures.py` drawings, `page.py` the page."""

from olmo_trainer.report.page import write_report as write_report

__all__ = ["write_report"]
