"""More causal language models of Hugging Face, of even sizes: 4 heads, 8 sequences, so that heads do divide."""

from __future__ import annotations

from typing import Any

import transformers as hf
from torch import nn

from .hugging_face import FAMILIES, SPECIAL, Batch, family, tokens

BATCH, LENGTH, WORDS = 8, 16, 320
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
GATED: dict[str, Any] = {**SIZES, **SPECIAL, "intermediate_size": 96, "use_cache": False}
GROUPED: dict[str, Any] = {**GATED, "num_key_value_heads": 2}


def labelled(model: nn.Module) -> tuple[nn.Module, Batch]:
    """The model with token ids that are their own labels."""
    ids = tokens(BATCH, LENGTH, WORDS)
    return model, {"input_ids": ids, "labels": ids.clone()}


def causal(name: str, kind: str, sizes: dict[str, Any], **more: Any) -> None:
    """Registers ``<kind>ForCausalLM`` of ``<kind>Config`` (or of the classes named with ``|`` between)."""
    model, _, config = kind.partition("|")

    def make() -> tuple[nn.Module, Batch]:
        made = getattr(hf, config or f"{model}Config")(**(sizes | more))
        return labelled(getattr(hf, model if config else f"{model}ForCausalLM")(made))

    FAMILIES[name] = make


causal("gpt2", "GPT2LMHeadModel|GPT2Config", SPECIAL, vocab_size=WORDS, n_embd=64, n_layer=2, n_head=4, n_positions=32,
       resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)  # fmt: skip
causal("llama", "Llama", GROUPED)
causal("llama_dynamic_rope", "Llama", GROUPED, rope_parameters={
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
})  # fmt: skip
causal("gemma", "Gemma", GROUPED, head_dim=16)
causal("gemma3", "Gemma3ForCausalLM|Gemma3TextConfig", GROUPED, head_dim=16, sliding_window=8)
causal("qwen3", "Qwen3", GROUPED, head_dim=16)
causal("phi", "Phi", GROUPED)
causal("cohere", "Cohere", GROUPED)
causal("cohere2", "Cohere2", GROUPED, sliding_window=8)
causal("olmo", "Olmo", GROUPED)
causal("olmo2", "Olmo2", GROUPED)
causal("granite", "Granite", GROUPED)
causal("starcoder2", "Starcoder2", GROUPED)
causal("smollm3", "SmolLM3", GROUPED)
causal("glm", "Glm", GROUPED, head_dim=16)
causal("glm4", "Glm4", GROUPED, head_dim=16)
causal("exaone4", "Exaone4", GROUPED)
causal("helium", "Helium", GROUPED, head_dim=16)
causal("nemotron", "Nemotron", GROUPED)
causal("persimmon", "Persimmon", GATED)
causal("diffllama", "DiffLlama", GROUPED, head_dim=16)
causal("arcee", "Arcee", GROUPED)
causal("falcon_multi_query", "Falcon", SIZES | SPECIAL, hidden_dropout=0.0, attention_dropout=0.0, multi_query=True,
       new_decoder_architecture=False, parallel_attn=True, use_cache=False)  # fmt: skip
causal("falcon_grouped", "Falcon", SIZES | SPECIAL, hidden_dropout=0.0, attention_dropout=0.0, num_kv_heads=2,
       new_decoder_architecture=True, use_cache=False)  # fmt: skip
causal("falcon_alibi", "Falcon", SIZES | SPECIAL, hidden_dropout=0.0, attention_dropout=0.0, alibi=True,
       multi_query=False, use_cache=False)  # fmt: skip
causal("mpt", "Mpt", SPECIAL, vocab_size=WORDS, d_model=64, n_layers=2, n_heads=4, max_seq_len=32, use_cache=False)
causal("codegen", "CodeGen", SPECIAL, vocab_size=WORDS, n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=32,
       resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)  # fmt: skip
causal("gpt_j", "GPTJ", SPECIAL, vocab_size=WORDS, n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=32,
       resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)  # fmt: skip
causal("gpt_neo", "GPTNeo", SPECIAL, vocab_size=WORDS, hidden_size=64, num_layers=2, num_heads=4, window_size=4,
       attention_types=[[["global", "local"], 1]], max_position_embeddings=32, resid_dropout=0.0, embed_dropout=0.0,
       attention_dropout=0.0, use_cache=False)  # fmt: skip
causal("gpt_bigcode", "GPTBigCode", SPECIAL, vocab_size=WORDS, n_embd=64, n_layer=2, n_head=4, n_positions=32,
       resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)  # fmt: skip
causal("gpt1", "OpenAIGPTLMHeadModel|OpenAIGPTConfig", {}, vocab_size=WORDS, n_embd=64, n_layer=2, n_head=4,
       n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
causal("xglm", "XGLM", SPECIAL, vocab_size=WORDS, d_model=64, num_layers=2, attention_heads=4, ffn_dim=96, dropout=0.0,
       attention_dropout=0.0, max_position_embeddings=32, use_cache=False)  # fmt: skip
causal("biogpt", "BioGpt", GATED, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
       max_position_embeddings=32)  # fmt: skip
causal("xlnet", "XLNetLMHeadModel|XLNetConfig", {}, vocab_size=WORDS, d_model=64, n_layer=2, n_head=4, d_inner=96,
       dropout=0.0, summary_last_dropout=0.0)  # fmt: skip
causal("ctrl", "CTRLLMHeadModel|CTRLConfig", {}, vocab_size=WORDS, n_embd=64, n_layer=2, n_head=4, dff=96,
       n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, use_cache=False)  # fmt: skip
causal("mamba2", "Mamba2", SPECIAL, vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=4,
       head_dim=16, n_groups=2, chunk_size=8, use_cache=False)  # fmt: skip
causal("falcon_mamba", "FalconMamba", SPECIAL, vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, state_size=4,
       use_cache=False)  # fmt: skip


@family
def rwkv() -> tuple[nn.Module, Batch]:
    """Few tokens: on CPU its recurrence is a loop over them."""
    config = hf.RwkvConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32, context_length=32,
        use_cache=False, **SPECIAL,
    )  # fmt: skip
    ids = tokens(BATCH, 5, WORDS)
    return hf.RwkvForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


causal("recurrent_gemma", "RecurrentGemma", GATED | {"num_hidden_layers": 3}, num_key_value_heads=1, lru_width=64,
       attention_window_size=8, head_dim=16)  # fmt: skip
causal("bamba", "Bamba", GROUPED, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1,
       mamba_chunk_size=8, attn_layer_indices=[1])  # fmt: skip
causal("zamba2", "Zamba2", GROUPED | {"num_hidden_layers": 3}, mamba_d_state=8, n_mamba_heads=4, mamba_ngroups=1,
       mamba_headdim=32, chunk_size=8, num_mem_blocks=1, layers_block_type=["mamba", "hybrid", "mamba"],
       num_key_value_heads=4)  # fmt: skip
causal("jamba", "Jamba", GROUPED, num_experts=1, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1,
       mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False)  # fmt: skip
causal("lfm2", "Lfm2", GROUPED, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
causal("qwen3_next", "Qwen3Next", GROUPED, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
       shared_expert_intermediate_size=48, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16,
       linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"])  # fmt: skip


EXPERTS: dict[str, Any] = GROUPED | {"num_experts_per_tok": 2, "output_router_logits": True}
causal("qwen2_moe", "Qwen2Moe", EXPERTS, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=48)
causal("qwen3_moe", "Qwen3Moe", EXPERTS, num_experts=4, moe_intermediate_size=32, head_dim=16)
causal("olmoe", "Olmoe", EXPERTS, num_experts=4)
causal("deepseek_v3", "DeepseekV3", GATED, num_key_value_heads=4, moe_intermediate_size=32, n_routed_experts=4,
       num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=16,
       qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16)  # fmt: skip
causal("deepseek_v2", "DeepseekV2", GATED, num_key_value_heads=4, moe_intermediate_size=32, n_routed_experts=4,
       num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=16,
       qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16)  # fmt: skip
causal("llama4", "Llama4ForCausalLM|Llama4TextConfig", GROUPED, head_dim=16, intermediate_size_mlp=96,
       num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=2, attention_chunk_size=8)  # fmt: skip
causal("granite_moe", "GraniteMoe", GROUPED, num_local_experts=4, num_experts_per_tok=2)
causal("phi_moe", "Phimoe", GROUPED, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.0)
causal("glm4_moe", "Glm4Moe", GROUPED, head_dim=16, moe_intermediate_size=32, n_routed_experts=4,
       num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1)  # fmt: skip
causal("gpt_oss", "GptOss", GROUPED, num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=8)
