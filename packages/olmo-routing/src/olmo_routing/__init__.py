"""Routing for mixture-of-experts layers: gates, balance losses, row plans and balance reports.

Shape letters everywhere: T tokens, K experts a token, E experts, D model width, R rows, S source
ranks, Q destination ranks. A name ends in the letters of its shape.
"""

from ._admit import admit as admit
from ._balance_report import BalanceReport as BalanceReport
from ._balance_report import measure_balance as measure_balance
from ._expert_load import LoadReport as LoadReport
from ._expert_load import measure_load as measure_load
from ._losses import balance_loss as balance_loss
from ._losses import router_z_loss as router_z_loss
from ._route import Routing as Routing
from ._route import route as route
from ._router import Router as Router
from ._rows import RowPlan as RowPlan
from ._rows import plan_rows as plan_rows
from ._selection_bias import SelectionBias as SelectionBias

__all__ = [
    "BalanceReport",
    "LoadReport",
    "Router",
    "Routing",
    "RowPlan",
    "SelectionBias",
    "admit",
    "balance_loss",
    "measure_balance",
    "measure_load",
    "plan_rows",
    "route",
    "router_z_loss",
]
