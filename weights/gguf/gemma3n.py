"""Gemma 3n: what its keys say of each layer, and the names of what no other architecture has.

Torch-free. architectures.py reads the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist

from gptserve.weights.gguf.architecture import LATE_NORM, LAYER, OUTER, Architecture, with_windows
from gptserve.weights.gguf.keys import Fields, Keys

_SIDE, _TABLE = "blk.0.laurel_l.weight", "per_layer_token_embd.weight"
_INPUTS = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_STREAMS = {
    "altup_proj": "model.altup_projections.{}",
    "altup_unembd_proj": "model.altup_unembed_projections.{}",
}
_LAYER = LATE_NORM | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}


def _gemma3n(keys: Keys) -> Fields:
    table, side = (keys.header.tensors.get(name) for name in (_TABLE, _SIDE))
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "intermediate_size": keys.sizes("feed_forward_length"),
        "activation_sparsity_pattern": _shares_cut(keys),
        "altup_num_inputs": keys.size("altup.num_inputs"),
        "altup_active_idx": keys.count("altup.active_idx", 0),
        "hidden_size_per_layer_input": keys.size("embedding_length_per_layer_input"),
        "num_kv_shared_layers": keys.count("attention.shared_kv_layers"),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "rope_theta": keys.number("rope.freq_base", 1e6),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
        **({} if table is None else {"vocab_size_per_layer_input": table.shape[0]}),
        **({} if side is None else {"laurel_rank": side.shape[0]}),
        **with_windows(keys, 5),
    }


def _shares_cut(keys: Keys) -> list[float]:
    """Return which share of the gates of each layer is cut off.

    The file has how many deviations above their mean the largest of these lies, -inf for none. They were made of
    decimals of few digits.
    """
    name, num = "activation_sparsity_scale", keys.num_layers
    scales = keys.get(name)
    floats = [its for its in scales if isinstance(its, float) and its < math.inf] if isinstance(scales, list) else []
    if not isinstance(scales, list) or not len(floats) == len(scales) == num:
        raise keys.fault(name, f"a list of {num} numbers, or -inf for some")
    return [0.0 if scale == -math.inf else round(NormalDist().cdf(scale), 6) for scale in floats]


GEMMA3N: Mapping[str, Architecture] = {
    "gemma3n": Architecture(
        "gemma3n_text",
        _gemma3n,
        outer=OUTER | _INPUTS,
        layer=LAYER | _LAYER,
        stacks=_STREAMS,
        layers_differ=True,
    )
}
