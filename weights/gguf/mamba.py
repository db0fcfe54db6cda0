"""Architectures with mixers of Mamba-2: layers without heads of keys have those.

Torch-free. architectures.py reads the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gptserve.weights.errors import InvalidCheckpointError
from gptserve.weights.gguf.architecture import LAYER, OUTER, Architecture
from gptserve.weights.gguf.dense import granite
from gptserve.weights.gguf.keys import Fields, Keys
from gptserve.weights.gguf.mixtures import GRANITE_SHARED

_CHANNELS = ("ssm_conv1d.weight",)
_VECTORS = ("ssm_a.weight", "ssm_d.weight", "ssm_norm.weight")


def _mixer(name: str) -> dict[str, str]:
    names = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
    vectors = {"ssm_dt.bias": "dt_bias", "ssm_a.weight": "A_log", "ssm_d.weight": "D"}
    return {part: f"{name}.{its}" for part, its in (names | vectors).items()}


def _has_bias(keys: Keys) -> bool:
    return any(name.endswith("ssm_conv1d.bias") for name in keys.header.tensors)


def _granite(keys: Keys) -> Fields:
    keys.only("rope.scaling.finetuned", False, "files of models that rotate heads (Bamba) are not read")
    hidden, width = keys.size("embedding_length"), keys.size("ssm.inner_size")
    if width % hidden:
        raise keys.fault("ssm.inner_size", f"a multiple of embedding_length ({hidden})")
    experts = {"num_experts_per_tok": keys.size("expert_used_count")} if keys.get("expert_count") else {}
    return {
        **granite(keys),
        **experts,
        "num_local_experts": keys.count("expert_count", 0),
        "shared_intermediate_size": keys.size("expert_shared_feed_forward_length", keys.size("feed_forward_length")),
        "layer_types": ["attention" if its else "mamba" for its in keys.kv_heads_of_layers],
        "position_embedding_type": "nope",
        "mamba_n_heads": keys.size("ssm.time_step_rank"),
        "mamba_n_groups": keys.size("ssm.group_count"),
        "mamba_d_state": keys.size("ssm.state_size"),
        "mamba_d_conv": keys.size("ssm.conv_kernel"),
        "mamba_expand": width // hidden,
        "mamba_conv_bias": _has_bias(keys),
    }


def _nemotron(keys: Keys, letter: str = "-") -> Fields:
    """Return the fields of Nemotron-H, where each block of a feed-forward has this letter."""
    name, num, heads = "feed_forward_length", keys.size("block_count"), keys.kv_heads_of_layers
    widths, num_heads = keys.get(name), keys.size("ssm.time_step_rank")
    if not isinstance(widths, list) or len(widths) != num:
        raise keys.fault(name, f"a list of {num}")
    if keys.size("ssm.inner_size") % num_heads:
        raise keys.fault("ssm.inner_size", f"a multiple of ssm.time_step_rank ({num_heads})")
    return {
        "hybrid_override_pattern": "".join(
            "*" if its else letter if width else "M" for its, width in zip(heads, widths, strict=False)
        ),
        "mamba_num_heads": num_heads,
        "mamba_head_dim": keys.size("ssm.inner_size") // num_heads,
        "n_groups": keys.size("ssm.group_count"),
        "ssm_state_size": keys.size("ssm.state_size"),
        "conv_kernel": keys.size("ssm.conv_kernel"),
        "use_conv_bias": _has_bias(keys),
    }


def _nemotron_moe(keys: Keys) -> Fields:
    return {
        **_nemotron(keys, "E"),
        "n_routed_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length"),
        "moe_latent_size": keys.get("moe_latent_size"),
        "norm_topk_prob": keys.flag("expert_weights_norm", default=True),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "n_group": keys.size("expert_group_count", 1),
        "topk_group": keys.size("expert_group_used_count", 1),
    }


def _falcon(keys: Keys) -> Fields:
    """Return the fields of Falcon-H1, whose factors are in the weights; of tied ones its head had the embedding's."""
    if not keys.has("output.weight"):
        raise InvalidCheckpointError(f"{keys.header.path}: output.weight is missing: a tied head has other factors")
    return {
        "head_dim": keys.size("attention.key_length"),
        "mamba_d_ssm": keys.size("ssm.inner_size"),
        "mamba_n_heads": keys.size("ssm.time_step_rank"),
        "mamba_n_groups": keys.size("ssm.group_count"),
        "mamba_d_state": keys.size("ssm.state_size"),
        "mamba_d_conv": keys.size("ssm.conv_kernel"),
        "mamba_conv_bias": _has_bias(keys),
        "mamba_rms_norm": keys.has("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


_NEMOTRON = {
    **{"attn_norm": "norm", "attn_q": "mixer.q_proj", "attn_k": "mixer.k_proj", "attn_v": "mixer.v_proj"},
    **{"attn_output": "mixer.o_proj", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj"},
    **{"ffn_gate_inp": "mixer.gate", "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
    **{f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
    **_mixer("mixer"),
}


def _of_nemotron(more: Callable[[Keys], Fields]) -> Architecture:
    return Architecture(
        "nemotron_h",
        more,
        outer=OUTER | {"token_embd": "model.embeddings", "output_norm": "model.norm_f"},
        layer=_NEMOTRON,
        experts={f"ffn_{part}_exps": f"mixer.experts.{{}}.{part}_proj" for part in ("up", "down")},
        channels=_CHANNELS,
        vectors=_VECTORS,
        eps=("layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
        has_rotary=False,
        pairs_heads=True,
        layers_differ=True,
        has_decays=True,
    )


_GRANITE = {
    "ffn_gate.weight": "shared_mlp.input_linear.weight.first",
    "ffn_up.weight": "shared_mlp.input_linear.weight.last",
    "ffn_down": "shared_mlp.output_linear",
}
_FALCON = {
    "ffn_norm": "pre_ff_layernorm",
    **{f"ffn_{its}": f"feed_forward.{its}_proj" for its in ("gate", "up", "down")},
}
MAMBA: Mapping[str, Architecture] = {
    "granitehybrid": Architecture(
        "granitemoehybrid",
        _granite,
        layer=LAYER | GRANITE_SHARED | _GRANITE | _mixer("mamba"),
        channels=_CHANNELS,
        vectors=_VECTORS,
        has_rotary=False,
        pairs_heads=True,
        layers_differ=True,
        has_decays=True,
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        _falcon,
        outer=OUTER | {"output_norm": "model.final_layernorm"},
        layer=LAYER | _FALCON | _mixer("mamba"),
        channels=_CHANNELS,
        vectors=_VECTORS,
        has_decays=True,
    ),
    "nemotron_h": _of_nemotron(_nemotron),
    "nemotron_h_moe": _of_nemotron(_nemotron_moe),
}
