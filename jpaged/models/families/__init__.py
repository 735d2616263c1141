"""The families of this package, registered as those from outside it are."""

from jpaged.models.families.gpt2 import GPT2Family
from jpaged.models.families.llama import LLAMA, MINISTRAL, MISTRAL, QWEN2, QWEN3
from jpaged.models.families.opt import OPTFamily
from jpaged.models.families.sparse_llama import DOTS1, MIXTRAL, QWEN2_MOE, QWEN3_MOE
from jpaged.models.registry import register

register("LlamaForCausalLM", LLAMA)
register("MistralForCausalLM", MISTRAL)
register("MinistralForCausalLM", MINISTRAL)
register("Qwen2ForCausalLM", QWEN2)
register("Qwen3ForCausalLM", QWEN3)
register("OPTForCausalLM", OPTFamily())
register("GPT2LMHeadModel", GPT2Family())
register("Qwen3MoeForCausalLM", QWEN3_MOE)
register("Qwen2MoeForCausalLM", QWEN2_MOE)
register("MixtralForCausalLM", MIXTRAL)
register("Dots1ForCausalLM", DOTS1)
