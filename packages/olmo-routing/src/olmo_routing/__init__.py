"""Routing for mixture-of-experts layers: gates, balance losses, row plans and balance reports.

Shape letters everywhere: T tokens, K experts a token, E experts, D model width, R rows, S source
ranks, Q destination ranks. A name ends in the letters of its shape.
"""

from ._admit import admit as admit
from ._admit import keep_routes as keep_routes
from ._balance_report import BalanceReport as BalanceReport
from ._balance_report import measure_balance as measure_balance
from ._expert_load import LoadReport as LoadReport
from ._expert_load import measure_load as measure_load
from ._expert_load import stack_reports as stack_reports
from ._gerrymander_alarm import GerrymanderAlarm as GerrymanderAlarm
from ._load_window import LoadWindow as LoadWindow
from ._load_window import route_fractions as route_fractions
from ._losses import balance_loss as balance_loss
from ._losses import router_z_loss as router_z_loss
from ._margin_loss import margin_balance_loss as margin_balance_loss
from ._route import Routing as Routing
from ._route import route as route
from ._router import Router as Router
from ._rows import RowPlan as RowPlan
from ._rows import plan_rows as plan_rows
from ._selection_bias import SelectionBias as SelectionBias
from ._tiles import TilePlan as TilePlan
from ._tiles import plan_tiles as plan_tiles

__all__ = [
    "BalanceReport",
    "GerrymanderAlarm",
    "LoadReport",
    "LoadWindow",
    "Router",
    "Routing",
    "RowPlan",
    "SelectionBias",
    "TilePlan",
    "admit",
    "balance_loss",
    "keep_routes",
    "margin_balance_loss",
    "measure_balance",
    "measure_load",
    "plan_rows",
    "plan_tiles",
    "route",
    "route_fractions",
    "router_z_loss",
    "stack_reports",
]
