"""The balance numbers of a step: those of `measure_balance` on all its tokens, once each."""

import pytest
import torch
from olmo_routing import measure_balance
from olmo_trainer.build import Assembly, assemble
from olmo_trainer.data import Batch
from olmo_trainer.mesh import create_mesh
from olmo_trainer.model.block import Block
from olmo_trainer.model.moe import MoE, RouteMemory
from olmo_trainer.step import accumulate_gradients
from torch.utils.checkpoint import checkpoint

CPU = torch.device("cpu")


def _assembly(make_config, accumulation: int) -> Assembly:
    config = make_config("batch.sequences=4", f"batch.accumulation={accumulation}")
    return assemble(config, create_mesh(config.layout, CPU))


def _batches(accumulation: int) -> list[Batch]:
    tokens = torch.randint(0, 257, (4, 33), generator=torch.Generator().manual_seed(3))
    mask = torch.arange(32) < torch.tensor([[32], [20], [32], [7]])  # padding at the end
    targets = torch.where(mask, tokens[:, 1:], -100)
    made = Batch(tokens[:, :-1].contiguous(), targets.contiguous(), mask)
    parts = zip(
        *(each.chunk(accumulation) for each in (made.tokens_BS, made.targets_BS, made.mask_BS)),
        strict=True,
    )
    return [Batch(*part) for part in parts]


def _reports(assembly: Assembly, accumulation: int) -> list[dict[str, float]]:
    accumulate_gradients(assembly, _batches(accumulation))
    return [layer.report for layer in assembly.statistics.layers(num_ranks=2)]


def test_a_step_reports_what_all_its_tokens_say(make_config):
    assembly, routings = _assembly(make_config, 1), []
    for stage in assembly.stages.values():
        for module in stage.modules():
            if isinstance(module, MoE):
                module.router.register_forward_hook(lambda *call: routings.append(call[-1]))
    found = _reports(assembly, 1)
    mask_T = _batches(1)[0].mask_BS.flatten()
    assert len(found) == len(routings) == len(assembly.config.model.moe_layers)
    for report, routing in zip(found, routings, strict=True):
        expected = measure_balance(
            routing.scores_TE,
            routing.expert_ids_TK,
            mask_T=mask_T,
            num_ranks=2,
        )
        # Nobody here knows which tokens lost routes: 0 would say that none did.
        unknown = {"tokens_with_drops"}
        assert report.keys() == set(type(expected).names()) - unknown
        for name, value in report.items():
            wanted = float(getattr(expected, name))
            assert value == pytest.approx(wanted, rel=1e-5, abs=1e-6), name
        assert report["topk_margin"] > 0
        assert report["rank_imbalance"] > 1


def test_accumulation_changes_no_number(make_config):
    whole, parts = (_reports(_assembly(make_config, n), n) for n in (1, 4))
    for one, other in zip(whole, parts, strict=True):
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_recompute_counts_nothing_twice(make_config):
    plain = _assembly(make_config, 2)
    expected = _reports(plain, 2)
    recomputed = _assembly(make_config, 2)
    forwards = 0
    for stage in recomputed.stages.values():
        for block in stage.part.modules():
            if isinstance(block, Block):
                original = block.forward

                def count(*arguments, original=original, **options):
                    nonlocal forwards
                    forwards += 1
                    return original(*arguments, **options)

                def twice(*arguments, count=count):
                    # By the memory a layer knows its second forward, as in `Transformer`.
                    return checkpoint(count, *arguments, RouteMemory(), use_reentrant=False)

                block.forward = twice
    found = _reports(recomputed, 2)
    assert forwards == 2 * 2 * recomputed.config.model.num_layers  # each block ran twice
    assert found == expected
    assert recomputed.statistics.totals() == plain.statistics.totals()
    for layer in recomputed.config.model.moe_layers:
        counts = recomputed.statistics.counts(layer)
        assert torch.equal(counts, plain.statistics.counts(layer))
        top_k = recomputed.config.model.moe.top_k
        assert counts.sum() == top_k * sum(each.mask_BS.sum() for each in _batches(2))
