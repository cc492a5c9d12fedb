"""Tiny random models of mlx-lm's stock architectures, one for each kind of cache and attention."""

import importlib
from typing import Any

import mlx.core as mx

VOCABULARY = 128
WINDOW = 8

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_MIXED_LAYERS = {
    **_BASE,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _BASE,
    "qwen3": _BASE,
    "gemma3_text": {
        **_BASE,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
    "gpt_oss": {
        **_BASE,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "rope_scaling": None,
        "layer_types": None,
    },
    "mamba2": {
        "num_heads": 4,
        "head_dim": 16,
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 8,
        "ssm_state_size": 8,
        "num_hidden_layers": 2,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "expand": 2,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": (0.001, 100.0),
        "time_step_rank": "auto",
        "max_position_embeddings": 512,
    },
    "lfm2": {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "rope_theta": 10000.0,
        "full_attn_idxs": [1, 3],
    },
    "falcon_h1": {
        **_BASE,
        "mamba_d_conv": 4,
        "mamba_d_ssm": 64,
        "mamba_d_state": 8,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_expand": 1,
    },
    "llama4": {
        "text_config": {
            **_BASE,
            "attention_bias": False,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "model_type": "llama4_text",
            "rope_scaling": None,
            "use_qk_norm": True,
        }
    },
    "gemma4_text": {**_MIXED_LAYERS, "global_head_dim": 16},
    "gemma3n": {
        "text_config": {
            **_MIXED_LAYERS,
            "model_type": "gemma3n_text",
            "altup_num_inputs": 2,
            "altup_active_idx": 0,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "laurel_rank": 8,
            "rope_local_base_freq": 10000.0,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 16,
        }
    },
    "deepseek_v3": {
        **_BASE,
        "kv_lora_rank": 16,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": None,
        "moe_intermediate_size": 32,
    },
}


def tiny_model(architecture: str, dtype: mx.Dtype = mx.float32) -> Any:
    """A random model; the same one on every call."""
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    mx.random.seed(7)
    arguments = {"model_type": architecture, **CONFIGS[architecture]}
    model = module.Model(module.ModelArgs.from_dict(arguments))
    _fill_sinks(model)
    model.set_dtype(dtype)
    model.eval()
    return model


def _fill_sinks(model: Any) -> None:
    for part in model.modules():
        if "sinks" in part:
            part.sinks = mx.random.normal(part.sinks.shape)
