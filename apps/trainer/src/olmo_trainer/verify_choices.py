"""Does a choice change the numbers? One word of the configuration at a time, beside plain FP32.

Schedules, dispatchers, recompute, compiled graphs and the layout of an optimizer must give what one
process gives. Of graphs torch's own operations are run, so that no machine needs a compiler for it.
MXFP8 rounds, so its gradient is held to a bound: above what rounding and the tokens that it sends
to other experts do (0.09 with `nano`), far below what a wrong operand does (1 and more).
An optimizer is judged by its update, beside its own in one process.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from olmo_trainer.config import (
    LayoutConfig,
    NoCompile,
    NoRecompute,
    NoRerun,
    PrecisionConfig,
    TrainerConfig,
)
from olmo_trainer.data import Batch
from olmo_trainer.local_ranks import run_local_ranks
from olmo_trainer.open_data import open_data
from olmo_trainer.overrides import apply_overrides
from olmo_trainer.verify import (
    NOISE,
    SCENARIOS,
    Case,
    Layout,
    Measured,
    check_config,
    compare,
    flat,
    make_scenario,
    measure,
    ratio_and_distance,
)

ALONE, EXPERTS, STAGES = Layout(1, 1, 1), Layout(2, 2, 1), Layout(1, 1, 2)
ACCUMULATION = 3
RATE = 1e-3
# Newton-Schulz iterations multiply FP32's rounding by up to 500.
UPDATE_TOLERANCE = 1e-2
LOSS_BOUND = 0.05  # relative, where products are rounded to MXFP8
RATIO_BOUND = 0.1  # of the whole gradient's length along the exact one, from 1
MXFP8 = "precision.mxfp8=experts,shared,attention"


@dataclass(frozen=True)
class Choice:
    """One run to compare.

    Attributes:
        name: What it is.
        settings: What makes it.
        layout: Its sizes.
        scenario: Which batch.
        against: Settings of the one-process run that it is held beside.
        bound: Most relative distance of the whole gradient; `None` = the same numbers.
        keeps_forward: With a bound: whether loss and expert counts are the same all the same.
        updates: Compare what a step of the optimizer does, too.
    """

    name: str
    settings: tuple[str, ...]
    layout: Layout = ALONE
    scenario: str = SCENARIOS[0]
    against: tuple[str, ...] = ()
    bound: float | None = None
    keeps_forward: bool = False
    updates: bool = False

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.layout.world


@dataclass(frozen=True)
class ChoiceVerdict:
    """A choice beside the run it must equal or be near; empty `faults` means that it does."""

    choice: Choice
    loss: float
    ratio: float
    distance: float
    faults: tuple[str, ...]


def _choices() -> tuple[Choice, ...]:
    kinds = ("gpipe", "interleaved", "v_shape", "zero_bubble_h1", "zero_bubble_v", "dual_pipe_v")
    made = [Choice(f"schedule {kind}", (f"layout.schedule.kind={kind}",), STAGES) for kind in kinds]
    search = ("layout.schedule.kind=search", "layout.schedule.memory_cap=3")
    made.append(Choice("schedule search", search, STAGES))
    halves = ("layout.schedule.backward=split",)
    made.append(Choice("schedule search, split backward", search + halves, STAGES))
    for scenario in SCENARIOS:
        rowwise = ("layout.dispatcher.kind=rowwise",)
        made.append(Choice("dispatcher rowwise", rowwise, EXPERTS, scenario))
        made.append(
            Choice("recompute blocks", ("recompute.kind=blocks",), EXPERTS, scenario),
        )
    split = ("recompute.kind=blocks", "layout.schedule.kind=zero_bubble_v")
    both = ("recompute.kind=blocks", "layout.dispatcher.kind=rowwise")
    made += [
        # From too little room for any expert: only reruns give all routes theirs.
        Choice(
            "rerun of drops",
            (
                *("layout.dispatcher.kind=rowwise", "layout.dispatcher.capacity_factor=0.02"),
                *("rerun.kind=drops", "rerun.growth=4"),
            ),
            EXPERTS,
        ),
        Choice("recompute experts", ("recompute.kind=experts",), EXPERTS),
        Choice("recompute blocks, split backward", split, STAGES),
        Choice("recompute blocks, rowwise", both, EXPERTS),
        Choice("recompute blocks, rowwise, context", both, Layout(1, 2, 1, context=2)),
        Choice(
            "saved in mxfp8",
            ("precision.saved=mxfp8",),
            EXPERTS,
            bound=0.05,
            keeps_forward=True,
        ),
    ]
    graphs = ("compile.kind=dense", "compile.backend=aot_eager")
    cut, halves = Layout(1, 2, 1, context=2), "layout.schedule.kind=zero_bubble_h1"
    made += [
        Choice("compile, recompute blocks, context", (*graphs, split[0]), cut),
        # Of a stage without routed layers a graph would hold all, and leave nothing to split.
        Choice("compile, split backward", (*graphs, halves), STAGES),
    ]
    for layer in ("experts", "shared", "attention"):
        made.append(Choice(f"mxfp8 {layer}", (f"precision.mxfp8={layer}",), bound=0.3))
    made.append(Choice("mxfp8 everywhere", (MXFP8,), EXPERTS, against=(MXFP8,)))
    made.append(Choice("mxfp8, split backward", (MXFP8, halves), STAGES, against=(MXFP8,)))
    # An epsilon near the gradients: a first step of Adam is else all signs, those of noise too.
    for name, settings in (
        ("adamw", ("optimizer.kind=adamw", "optimizer.epsilon=1e-3")),
        ("muon", ("optimizer.kind=muon", "optimizer.products=fp32", "optimizer.epsilon=1e-3")),
    ):
        for layout in (EXPERTS, STAGES):
            made.append(Choice(name, settings, layout, against=settings, updates=True))
    words = ("collective=reduce_scatter", "reduce=in_backward", "gather=in_forward")
    plain = ("optimizer.kind=adamw", "optimizer.epsilon=1e-3")
    replicas = (*plain, *(f"optimizer.replicas.{word}" for word in words))
    for scenario in SCENARIOS:  # a rank without tokens has gradients all the same
        made.append(Choice("replicas", replicas, Layout(2, 1, 1), scenario, plain, updates=True))
    return tuple(made)


CHOICES = _choices()


def verify_choices(
    config: TrainerConfig, choices: Sequence[Choice] = CHOICES
) -> tuple[list[ChoiceVerdict], dict[str, str]]:
    """Hold each choice beside one process; return the verdicts, and what does not fit and why.

    Everything else of `config` stays, but that it is FP32, without recompute, not compiled, on a
    CPU.
    """
    plain = check_config(config).model_copy(
        update={
            "precision": PrecisionConfig(parameters="fp32"),
            "recompute": NoRecompute(),
            "compile": NoCompile(),
            "layout": LayoutConfig(),
            "rerun": NoRerun(),
        }
    )
    fitting, unfit = [], {}
    for choice in choices:
        try:
            choice_config(plain, choice)
        except ValueError as error:
            unfit[choice.name] = str(error)
        else:
            fitting.append(choice)
    batch = open_data(plain).global_batch(0)
    scenarios = {name: make_scenario(batch, name, pad_id=0) for name in SCENARIOS}
    references = list(dict.fromkeys(_reference(choice) for choice in fitting))
    measured: dict[Choice, Measured] = {}
    for world in (1, 2):
        ours = [each for each in (*references, *fitting) if each.world == world]
        found = run_local_ranks(measure_choices, world, plain, ours, scenarios)[0] if ours else []
        measured |= dict(zip(ours, found, strict=True))
    verdicts = [judge(each, measured[each], measured[_reference(each)]) for each in fitting]
    return verdicts, unfit


def choice_config(plain: TrainerConfig, choice: Choice) -> TrainerConfig:
    """Return the configuration of a choice; raise `ValueError` when it does not fit."""
    sizes = [f"layout.{name}={size}" for name, size in choice.layout._asdict().items()]
    sizes.append(f"batch.accumulation={ACCUMULATION}")
    return apply_overrides(plain, [*choice.settings, *sizes]).for_world(choice.world)


def measure_choices(
    plain: TrainerConfig, choices: Sequence[Choice], scenarios: dict[str, Batch]
) -> list[Measured]:
    """Run each choice in this process group; every rank returns the global result."""
    return [
        measure(
            choice_config(plain, choice),
            scenarios[choice.scenario],
            rate=RATE if choice.updates else 0.0,
        )
        for choice in choices
    ]


def judge(choice: Choice, measured: Measured, reference: Measured) -> ChoiceVerdict:
    """Hold a choice beside its reference."""
    ratio, distance = ratio_and_distance(
        flat(measured.gradients), flat(reference.gradients), NOISE * reference.norm
    )
    same = compare(Case(choice.layout, ACCUMULATION, choice.scenario), measured, reference)
    faults = list(same.faults)
    if choice.bound is not None:
        allowed = ("gradient",) if choice.keeps_forward else ("",)
        faults = [each for each in faults if not each.startswith(allowed)]
        if not distance <= choice.bound:
            faults.append(f"gradient: distance {distance:.3f} is above {choice.bound:g}")
        if not abs(ratio - 1) <= RATIO_BOUND:
            faults.append(f"gradient: ratio {ratio:.4f}")
        if not same.loss_deviation <= LOSS_BOUND:
            faults.append(f"loss: deviates by {same.loss_deviation:.2e}")
    for name, update in reference.updates.items():
        along, apart = ratio_and_distance(measured.updates[name], update, 0.0)
        if not apart <= UPDATE_TOLERANCE:
            faults.append(f"update of {name}: ratio {along:.4f}, distance {apart:.1e}")
    return ChoiceVerdict(choice, measured.loss, ratio, distance, tuple(faults))


def _reference(choice: Choice) -> Choice:
    return Choice("one process", choice.against, scenario=choice.scenario, updates=choice.updates)
