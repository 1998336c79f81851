"""Norms and biases by name, in the ways that models write them, whatever their shape."""

import pytest
import torch
from olmo_distopt import decays_matrices, is_hidden_matrix
from torch import nn

BIASES = [
    *("blocks.0.experts.b_gate_up_E2H", "blocks.0.experts.b_down_ED", "experts.b_ED"),
    *("mlp.b", "mlp.b1", "mlp.b2", "mlp.b10", "attn.b_q", "attn.b_Q", "b_in", "experts.b_up.3"),
    *("attn.q.bias", "experts.up_bias", "experts.biases", "experts.biases.0", "in_proj_bias"),
    *("experts.gate_up_proj_bias", "rnn.bias_ih_l0", "e_score_correction_bias", "router.bias_E"),
    *("selection_bias.values", "mlp.qbias"),
]
NORMS = [
    *("ln.weight", "ln1.weight", "ln_1.weight", "ln_10.weight", "ln10.weight", "ln_f.weight"),
    *("lnf.weight", "blocks.0.ln_attn.weight", "ln_post.weight", "ln_q.gain", "attn_ln.weight"),
    *("rms.weight", "rms_1.weight", "rms1.weight", "rms_attn.weight", "rms_final", "RMSNorm.w"),
    *("q_norm.weight", "norms.3.weight", "final_layernorm.weight", "experts.norm_ED"),
]
WEIGHTS = [
    *("b_proj.weight", "b.weight", "b1.weight", "b_q.weight", "blocks.b.w", "b_gate.0.weight"),
    *("lora_B", "lora_b.weight", "adapter.B", "adapter.B1", "adapter.B_ED", "ssm.B_proj.weight"),
    *("blocks.0.w", "backbone.w", "beta", "base.weight", "bilinear", "bottleneck.weight"),
    *("experts.w_gate_up_E2HD", "experts.w_down_EDH", "attn.W_Q", "up.0", "blocks.10.q.weight"),
    *("lnproj.weight", "kiln.weight", "alarms.weight", "transforms.0.weight", "q.weight"),
]


@pytest.mark.parametrize("shape", [(4,), (4, 6), (2, 4, 6)], ids=len)
@pytest.mark.parametrize("prefix", ["", "blocks.3.", "model.layers.10.mlp."])
def test_neither_norms_nor_biases_decay_or_are_orthogonalised(prefix, shape):
    parameter = nn.Parameter(torch.ones(shape))
    for name in (*BIASES, *NORMS):
        assert not decays_matrices(prefix + name, parameter), name
        assert not is_hidden_matrix(prefix + name, parameter), name
    for name in WEIGHTS:
        assert decays_matrices(prefix + name, parameter) is (len(shape) > 1), name
        assert is_hidden_matrix(prefix + name, parameter) is (len(shape) > 1), name
