"""Layers that keep states as llama.cpp's conversion writes them, and back: the tensors of Qwen3.5 and Qwen3-Next."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGUFWriter

Values = dict[str, np.ndarray]

QWENS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
_PARTS_OF_FUSED = ("in_proj_qkv", "in_proj_z")


def add_states(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """Add the keys of the layers that keep states."""
    num_values = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(num_values)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * num_values)
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    if config["model_type"] != "qwen3_next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def _tiled(config: dict[str, Any], size: int) -> np.ndarray:
    """Return which row of the checkpoint each row of value heads of this size has in the file."""
    num_keys, num = config["linear_num_key_heads"], config["linear_num_value_heads"]
    rows = np.arange(num * size)
    if config["model_type"] == "qwen3_next":
        return rows
    return rows.reshape(num_keys, num // num_keys, size).swapaxes(0, 1).ravel()


def _axis_and_order(config: dict[str, Any], name: str, width: int) -> tuple[int, np.ndarray]:
    """Return the axis of a tensor with value heads, and its order in the file."""
    size = config["linear_value_head_dim"]
    if ".out_proj." in name:
        return 1, _tiled(config, size)
    if any(part in name for part in (".in_proj_a.", ".in_proj_b.", "A_log", "dt_")):
        return 0, _tiled(config, 1)
    of_values = _tiled(config, size)
    num_others = width - len(of_values)  # queries and keys
    return 0, np.concatenate((np.arange(num_others), of_values + num_others))


def _has_value_heads(name: str) -> bool:
    kept = ("norm", "in_proj_ba", "in_proj_qkvz")
    return ".linear_attn." in name and not any(part in name for part in kept)


def _parts(config: dict[str, Any], num_rows: int) -> list[np.ndarray]:
    """Return the rows of queries, keys and values, and of gates, in a tensor that has them key head by key head."""
    num_keys, group = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key, value = config["linear_key_head_dim"], group // num_keys * config["linear_value_head_dim"]
    rows = np.arange(num_rows).reshape(num_keys, -1)
    queries, keys, values, gates = np.split(rows, [key, 2 * key, 2 * key + value], axis=1)
    return [np.concatenate([part.ravel() for part in (queries, keys, values)]), gates.ravel()]


def as_written(config: dict[str, Any], values: Values, *, older: bool) -> Values:
    """Return the tensors as they are in a file, by names that the package gguf knows."""
    found: Values = {}
    for name, value in values.items():
        if "in_proj_qkvz" in name and not older:
            for part, rows in zip(_PARTS_OF_FUSED, _parts(config, len(value)), strict=True):
                found[name.replace("in_proj_qkvz", part)] = value[rows]
            continue
        if _has_value_heads(name):
            axis, order = _axis_and_order(config, name, len(value))
            value = np.take(value, order, axis)
        if name.endswith("A_log"):
            value = -np.exp(value)
        if "conv1d" in name:
            value = value[:, 0]
        found[name.replace("dt_bias", "dt_proj.bias")] = value
    return found


def as_published(config: dict[str, Any], values: Values, published: Values) -> Values:
    """Return the same tensors in the order of the checkpoint; what is no matrix is that of `published`."""
    found: Values = {}
    for name, value in published.items():
        if "in_proj_qkvz" in name and name not in values:
            found[name] = value.copy()
            for part, rows in zip(_PARTS_OF_FUSED, _parts(config, len(value)), strict=True):
                found[name][rows] = values[name.replace("in_proj_qkvz", part)]
        elif ".linear_attn." in name and (value.ndim != 2 or "norm" in name):
            found[name] = value
        elif _has_value_heads(name):
            axis, order = _axis_and_order(config, name, len(value))
            found[name] = np.take(values[name], np.argsort(order), axis)
        else:
            found[name] = values[name]
    return found
