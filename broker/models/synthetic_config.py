"""Small configurations of mlx-lm's architectures, in proportions that every backend's kernels take.
No MLX."""

from collections.abc import Callable
from typing import Any, NamedTuple

Config = dict[str, Any]
STATE = 32  # the smallest state that the GPU kernels of state-space and delta layers divide evenly
CONVOLUTION = 4


class Sizes(NamedTuple):
    """The sizes that a spec can set, after defaults; `window` is 0 where none was asked for."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context: int
    window: int


def configuration(architecture: str, sizes: Sizes) -> Config:
    """config.json of `architecture` at these sizes; one that is not in `FAMILIES` gets the common
    part."""
    family = FAMILIES.get(architecture)
    return {**_common(architecture, sizes), **(family(sizes) if family else {})}


def _common(architecture: str, sizes: Sizes) -> Config:
    return {
        "model_type": architecture,
        "num_hidden_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.intermediate,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": sizes.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _llama(sizes: Sizes) -> Config:
    if not sizes.window:
        return {}
    return {"sliding_window": sizes.window, "layer_types": _alternating(sizes)}


def _gemma3_text(sizes: Sizes) -> Config:
    return {
        "sliding_window": sizes.window or 64,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": sizes.head_dim,
    }


def _gpt_oss(sizes: Sizes) -> Config:
    return {
        "sliding_window": sizes.window or 64,
        "layer_types": _alternating(sizes),
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }


def _mamba2(sizes: Sizes) -> Config:
    return {
        "num_heads": sizes.heads,
        "intermediate_size": sizes.heads * sizes.head_dim,
        "state_size": STATE,
        "conv_kernel": CONVOLUTION,
        "n_groups": 1,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": "auto",
    }


def _falcon_h1(sizes: Sizes) -> Config:
    return {
        "mamba_d_ssm": sizes.heads * sizes.head_dim,
        "mamba_n_heads": sizes.heads,
        "mamba_d_head": sizes.head_dim,
        "mamba_d_state": STATE,
        "mamba_d_conv": CONVOLUTION,
        "mamba_n_groups": 1,
    }


def _lfm2(sizes: Sizes) -> Config:
    return {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": sizes.hidden,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": list(range(1, sizes.layers, 2)),
    }


def _nemotron_h(sizes: Sizes) -> Config:
    return {
        "hybrid_override_pattern": [("M", "*", "-")[index % 3] for index in range(sizes.layers)],
        "mamba_num_heads": sizes.heads,
        "mamba_head_dim": sizes.head_dim,
        "mamba_proj_bias": False,
        "ssm_state_size": STATE,
        "conv_kernel": CONVOLUTION,
        "n_groups": 1,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
    }


def _qwen3_next(sizes: Sizes) -> Config:
    return {
        "full_attention_interval": 2,
        "linear_num_value_heads": sizes.heads,
        "linear_num_key_heads": sizes.kv_heads,
        "linear_key_head_dim": STATE,
        "linear_value_head_dim": STATE,
        "linear_conv_kernel_dim": CONVOLUTION,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": sizes.intermediate,
        "mlp_only_layers": [],
        "moe_intermediate_size": sizes.intermediate,
        "partial_rotary_factor": 0.5,
    }


def _qwen3_moe(sizes: Sizes) -> Config:
    return {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": sizes.intermediate,
        "norm_topk_prob": True,
    }


def _deepseek_v3(sizes: Sizes) -> Config:
    return {
        "num_key_value_heads": sizes.heads,
        "kv_lora_rank": 2 * sizes.head_dim,
        "q_lora_rank": 2 * sizes.head_dim,
        "qk_rope_head_dim": sizes.head_dim,
        "qk_nope_head_dim": sizes.head_dim,
        "v_head_dim": sizes.head_dim,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": sizes.intermediate,
        "first_k_dense_replace": 1,
    }


def _alternating(sizes: Sizes) -> list[str]:
    kinds = ("sliding_attention", "full_attention")
    return [kinds[index % 2] for index in range(sizes.layers)]


FAMILIES: dict[str, Callable[[Sizes], Config]] = {
    "llama": _llama,
    "qwen3": lambda sizes: {},
    "gemma3_text": _gemma3_text,
    "gpt_oss": _gpt_oss,
    "mamba2": _mamba2,
    "falcon_h1": _falcon_h1,
    "lfm2": _lfm2,
    "nemotron_h": _nemotron_h,
    "qwen3_next": _qwen3_next,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
}
