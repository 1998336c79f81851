"""Does a layout change the numbers? Run a configuration under several and compare with one process.

For every layout and accumulation the same global batch goes through local gloo processes, in FP32,
from the same initial weights. Compared with one process and one microbatch: the loss, every
parameter's gradient (as a ratio, so that a factor shows: 2.000 is a sum that should be a mean),
the gradient norm, the gradient of the auxiliary losses alone, the selection biases after their
update, and the expert counts. Gradients, never weights after Adam, which hides constant factors.

The batches are made to hurt: valid tokens differ between ranks, a microbatch is all padding, a rank
has no token at all, and the last expert of each layer is never chosen.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from olmo_trainer.build import Assembly, assemble, is_expert
from olmo_trainer.compiler import require_compiler
from olmo_trainer.config import (
    AutoDispatcher,
    BatchConfig,
    LayoutConfig,
    MoEConfig,
    OneFOneB,
    RowwiseDispatcher,
    TrainerConfig,
)
from olmo_trainer.data import Batch
from olmo_trainer.local_ranks import run_local_ranks
from olmo_trainer.mesh import create_mesh
from olmo_trainer.open_data import open_data
from olmo_trainer.overrides import parse_config
from olmo_trainer.step import accumulate_gradients, gradient_norm, update_biases


class Layout(NamedTuple):
    """Sizes of a layout; `expert` divides `data * context`."""

    data: int
    expert: int
    pipeline: int
    context: int = 1

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.data * self.context * self.pipeline


LAYOUTS = (
    Layout(1, 1, 1),
    Layout(2, 1, 1),
    Layout(2, 2, 1),
    Layout(1, 1, 2),
    Layout(2, 2, 2),
    Layout(1, 2, 1, context=2),
    Layout(2, 4, 1, context=2),
)
ACCUMULATIONS = (1, 3)
SCENARIOS = ("ragged", "silent rank")
# Divisible by every data size times accumulation of the above.
SEQUENCES = 12
MAX_LENGTH = 64
# FP32 sums in another order: the largest distance seen is 7e-7, over all layouts of the toy.
GRADIENT_TOLERANCE = 5e-5
SCALAR_TOLERANCE = 1e-5
TOLERANCE = (
    f"relative distance {GRADIENT_TOLERANCE:g} of each gradient, {SCALAR_TOLERANCE:g} of loss and "
    "norm; selection biases and expert counts exact"
)
# Part of the whole gradient's length below which a gradient is rounding noise.
NOISE = 1e-7
SILENT_BIAS = -1e4


@dataclass(frozen=True)
class Case:
    """One run to compare."""

    layout: Layout
    accumulation: int
    scenario: str


@dataclass
class Measured:
    """What a run under some layout computed, in global terms."""

    loss: float
    auxiliary: float
    norm: float
    gradients: dict[str, torch.Tensor]
    auxiliary_gradients: dict[str, torch.Tensor]
    biases: dict[int, torch.Tensor]
    counts: dict[int, torch.Tensor]
    updates: dict[str, torch.Tensor] = field(default_factory=dict)  # of one optimizer step


@dataclass
class Verdict:
    """A case beside the one-process run; empty `faults` means equal."""

    case: Case
    loss: float
    loss_deviation: float
    ratios: dict[str, float]
    gradient_deviation: float
    norm_ratio: float
    auxiliary_ratio: float
    bias_deviation: float
    counts_equal: bool
    faults: list[str] = field(default_factory=list)


def verify(
    config: TrainerConfig,
    layouts: Iterable[tuple[int, ...]] | None = None,
    accumulations: Sequence[int] = ACCUMULATIONS,
) -> list[Verdict]:
    """Compare `config` under each layout and accumulation with one process; one verdict a case.

    Args:
        config: The run.
        layouts: Sizes as `Layout` takes them; `None`: those of `layouts_for`.
        accumulations: Microbatches a rank.

    Raises:
        ValueError: The configuration does not divide into a layout, or asks for a compiler that is
            not here.
    """
    config = check_config(config)
    require_compiler(config, torch.device("cpu"))
    layouts = layouts_for(config) if layouts is None else [Layout(*each) for each in layouts]
    for layout, accumulation in itertools.product(layouts, accumulations):
        case_config(config, Case(layout, accumulation, SCENARIOS[0]))
    batch = open_data(config).global_batch(0)
    scenarios = {name: make_scenario(batch, name, pad_id=0) for name in SCENARIOS}
    alone = [Case(Layout(1, 1, 1), 1, name) for name in SCENARIOS]
    measured = run_local_ranks(measure_cases, 1, config, alone, scenarios)[0]
    references = dict[str, Measured](zip(SCENARIOS, measured, strict=True))
    expects_auxiliary = config.loss.z_loss > 0 or (
        config.model.moe_layers and has_auxiliary_gradient(config.model.moe)
    )
    for each in measured:
        if expects_auxiliary and not flat(each.auxiliary_gradients).norm() > NOISE * each.norm:
            raise RuntimeError("the auxiliary losses reach no parameter in the one-process run")
    verdicts = []
    for layout in layouts:
        cases = [Case(layout, a, s) for a in accumulations for s in SCENARIOS]
        measured = run_local_ranks(measure_cases, layout.world, config, cases, scenarios)[0]
        verdicts += [
            compare(case, each, references[case.scenario])
            for case, each in zip(cases, measured, strict=True)
        ]
    return verdicts


def layouts_for(config: TrainerConfig) -> list[Layout]:
    """Return `LAYOUTS` without those whose context ranks cannot share this model.

    Not every model's heads divide; data, expert and pipeline ranks are asked for all the same.
    """
    return [each for each in LAYOUTS if each.context == 1 or _divides(config, each)]


def _divides(config: TrainerConfig, layout: Layout) -> bool:
    try:
        case_config(config, Case(layout, 1, SCENARIOS[0]))
    except ValueError:
        return False
    return True


def has_auxiliary_gradient(moe: MoEConfig) -> bool:
    """Whether the auxiliary losses of the routers have a gradient at all.

    With every expert selected the load is uniform, and the balance loss constant.
    """
    return moe.z_loss > 0 or (moe.balance_loss > 0 and moe.top_k < moe.num_experts)


def check_config(config: TrainerConfig) -> TrainerConfig:
    """Return `config` as the check runs it: FP32 on the CPU, short sequences, biases on.

    Balance loss per sequence, whose value no accumulation can change; a per-microbatch loss is
    another function for another accumulation. A selection bias is needed to silence an expert.
    """
    moe = config.model.moe.model_copy(
        update={
            "balance_scope": "sequence",
            "bias_rate": config.model.moe.bias_rate or 1e-3,
            "balance_loss": config.model.moe.balance_loss or 1e-2,
        }
    )
    length = min(config.data.sequence_length, MAX_LENGTH)
    return config.model_copy(
        update={
            "device": "cpu",
            "model": config.model.model_copy(update={"moe": moe}),
            "precision": config.precision.model_copy(update={"parameters": "fp32"}),
            "data": config.data.model_copy(update={"sequence_length": length}),
            "batch": BatchConfig(sequences=SEQUENCES, accumulation=1),
            "optimizer": config.optimizer.model_copy(update={"impl": "auto"}),
        }
    )


def case_config(config: TrainerConfig, case: Case) -> TrainerConfig:
    """Return the configuration of a case; raise `ValueError` when it does not divide."""
    sizes = case.layout
    schedule = config.layout.schedule if sizes.pipeline > 1 else OneFOneB()
    tree = config.model_dump(mode="json")
    dispatcher = config.layout.dispatcher if sizes.expert > 1 else AutoDispatcher()
    if isinstance(dispatcher, RowwiseDispatcher):  # what is dropped depends on the layout
        dispatcher = RowwiseDispatcher(timeout_s=dispatcher.timeout_s)
    tree["layout"] = LayoutConfig(
        **sizes._asdict(), schedule=schedule, dispatcher=dispatcher
    ).model_dump(mode="json")
    tree["batch"]["accumulation"] = case.accumulation
    tree["rerun"] = {"kind": "none"}  # without a capacity nothing is dropped
    return parse_config(tree).for_world(sizes.world)


def make_scenario(batch: Batch, name: str, *, pad_id: int) -> Batch:
    """Return `batch` with its sequences cut to unequal lengths.

    `ragged`: lengths from none to all, so that ranks and microbatches hold unequal numbers of
    tokens and one microbatch of two sequences is all padding. `silent rank`: the first half of the
    sequences, all of one of two data ranks, is padding.
    """
    count, length = batch.tokens_BS.shape
    ragged = [length, 1, length // 4, 0, length - 1, length // 2, 5, length // 3, 0, 0, 3, length]
    silent = [0] * (count // 2) + [length, 7, 0, length // 2, 1, length]
    lengths = torch.tensor(ragged if name == "ragged" else silent).clamp(max=length)
    real = torch.arange(length) < lengths[:, None]
    # The last real token of a cut sequence has no real successor to predict.
    predicts = torch.arange(length) < lengths[:, None] - 1
    return Batch(
        tokens_BS=batch.tokens_BS.masked_fill(~real, pad_id),
        targets_BS=batch.targets_BS.masked_fill(~predicts, -100),
        mask_BS=real,
        documents_BS=batch.documents_BS,
    )


def measure_cases(
    config: TrainerConfig, cases: Sequence[Case], scenarios: dict[str, Batch]
) -> list[Measured]:
    """Run each case in this process group; every rank returns the global result."""
    return [measure(case_config(config, case), scenarios[case.scenario]) for case in cases]


def measure(config: TrainerConfig, batch: Batch, *, rate: float = 0.0) -> Measured:
    """Run one global batch under the layout of `config`, and at a `rate` above 0 one update."""
    assembly = assemble(config, create_mesh(config.layout, torch.device("cpu")))
    for bias in assembly.selection_biases.values():
        bias.bias_E[-1] = SILENT_BIAS
    mesh, accumulation = assembly.mesh, config.batch.accumulation
    batches = split_batch(batch, mesh.num_data * accumulation)
    mine = batches[mesh.data * accumulation : (mesh.data + 1) * accumulation]
    batches = [each.context_part(mesh.context, mesh.num_context) for each in mine]
    accumulate_gradients(assembly, batches, loss_scale=0.0)
    auxiliary_gradients = gather_gradients(assembly)
    accumulate_gradients(assembly, batches)
    totals = assembly.statistics.totals()
    update_biases(assembly)
    biases = {layer: bias.bias_E.clone() for layer, bias in assembly.selection_biases.items()}
    gradients, norm = gather_gradients(assembly), gradient_norm(assembly).item()
    return Measured(
        loss=totals.loss,
        auxiliary=totals.auxiliary_loss,
        norm=norm,
        gradients=gradients,
        auxiliary_gradients=auxiliary_gradients,
        biases={layer: bias for each in _everywhere(biases) for layer, bias in each.items()},
        counts={layer: assembly.statistics.counts(layer) for layer in config.model.moe_layers},
        updates=_take_step(assembly, rate) if rate else {},
    )


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """Cut a batch into `parts` batches of as many sequences each."""
    columns = [batch.tokens_BS, batch.targets_BS, batch.mask_BS]
    if batch.documents_BS is not None:
        columns.append(batch.documents_BS)
    return [Batch(*each) for each in zip(*(column.chunk(parts) for column in columns), strict=True)]


def gather_gradients(assembly: Assembly) -> dict[str, torch.Tensor]:
    """Return every parameter's reduced gradient, whole, on every rank."""
    return _gather(
        assembly, {name: _whole_sum(assembly, name, each) for name, each in assembly.parameters}
    )


def _whole_sum(assembly: Assembly, name: str, parameter: nn.Parameter) -> torch.Tensor:
    """Return a copy of a reduced gradient, from all replicas where each holds a range of it."""
    attributes = vars(parameter)
    gradient, own = attributes["main_grad"].clone(), attributes.get("main_grad_range")
    if own is None:
        return gradient
    start, length = own
    kept = gradient.view(-1)[start : start + length].clone()
    gradient.zero_().view(-1)[start : start + length] = kept
    dist.all_reduce(gradient, group=assembly.replica_groups.of(name, parameter).process_group)
    return gradient


def _take_step(assembly: Assembly, rate: float) -> dict[str, torch.Tensor]:
    """Return by how much a step moves every parameter, whole, on every rank."""
    before = {name: parameter.detach().clone() for name, parameter in assembly.parameters}
    assembly.optimizer.step(lr=rate)
    assembly.optimizer.wait()
    moved = {name: each.detach() - before[name] for name, each in assembly.parameters}
    return _gather(assembly, moved)


def _gather(assembly: Assembly, held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Join what ranks hold of each parameter by its global name: experts in their order."""
    mine = {
        (name, assembly.mesh.expert if is_expert(name) else 0): tensor
        for name, tensor in held.items()
    }
    shards = {key: value for each in _everywhere(mine) for key, value in each.items()}
    names = dict.fromkeys(name for name, _ in sorted(shards))
    return {
        name: torch.cat([shards[key] for key in sorted(shards) if key[0] == name]) for name in names
    }


def compare(case: Case, measured: Measured, reference: Measured) -> Verdict:
    """Hold a case beside the one-process run."""
    faults, ratios, deviations = [], {}, {}
    if measured.gradients.keys() != reference.gradients.keys():
        faults.append(f"parameters {measured.gradients.keys() ^ reference.gradients.keys()}")
    for name in reference.gradients.keys() & measured.gradients.keys():
        ratios[name], deviations[name] = ratio_and_distance(
            measured.gradients[name], reference.gradients[name], NOISE * reference.norm
        )
        if not deviations[name] <= GRADIENT_TOLERANCE:
            faults.append(f"gradient of {name}: ratio {ratios[name]:.4f}")
    auxiliary_ratio, auxiliary_deviation = ratio_and_distance(
        flat(measured.auxiliary_gradients),
        flat(reference.auxiliary_gradients),
        NOISE * reference.norm,
    )
    if not auxiliary_deviation <= GRADIENT_TOLERANCE:
        faults.append(f"gradient of the auxiliary losses: ratio {auxiliary_ratio:.4f}")
    loss_deviation = _relative(measured.loss, reference.loss)
    norm_ratio = measured.norm / reference.norm
    for what, deviation in (
        ("loss", loss_deviation),
        ("auxiliary loss", _relative(measured.auxiliary, reference.auxiliary)),
        ("gradient norm", abs(norm_ratio - 1)),
    ):
        if not deviation <= SCALAR_TOLERANCE:
            faults.append(f"{what}: deviates by {deviation:.2e}")
    bias_deviation = max(
        (
            float((measured.biases[layer] - bias).abs().max())
            for layer, bias in reference.biases.items()
        ),
        default=0.0,
    )
    if bias_deviation != 0:
        faults.append(f"selection bias: differs by {bias_deviation:.2e}")
    counts_equal = all(torch.equal(measured.counts[k], v) for k, v in reference.counts.items())
    if not counts_equal:
        faults.append("expert counts differ")
    return Verdict(
        case=case,
        loss=measured.loss,
        loss_deviation=loss_deviation,
        ratios=ratios,
        gradient_deviation=max(deviations.values()),
        norm_ratio=norm_ratio,
        auxiliary_ratio=auxiliary_ratio,
        bias_deviation=bias_deviation,
        counts_equal=counts_equal,
        faults=faults,
    )


def flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return all tensors as one line, in the order of their names."""
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


def ratio_and_distance(
    measured: torch.Tensor, reference: torch.Tensor, noise: float
) -> tuple[float, float]:
    """Return the projection of `measured` on `reference`, and the relative distance of the two.

    A reference no longer than `noise` is rounding: only the distance counts, over `noise`.
    """
    if measured.shape != reference.shape:
        return float("nan"), float("inf")
    a, b = measured.double().flatten(), reference.double().flatten()
    length, distance = float(b.norm()), float((a - b).norm())
    if length <= noise:
        return 1.0, GRADIENT_TOLERANCE * distance / noise if distance else 0.0
    return float(a @ b / (b @ b)), distance / length


def _relative(measured: float, reference: float) -> float:
    return abs(measured - reference) / max(abs(reference), 1e-12)


def _everywhere(mine: Any) -> list[Any]:
    """Return every rank's value, in rank order."""
    if not dist.is_initialized():
        return [mine]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered
