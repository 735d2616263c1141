"""The families of this package, registered as those from outside it are."""

from jpaged.models.families.afmoe import AfmoeFamily
from jpaged.models.families.apertus import ApertusFamily
from jpaged.models.families.bamba import BambaFamily
from jpaged.models.families.bloom import BloomFamily
from jpaged.models.families.cohere import COHERE, COHERE2, COHERE2_MOE
from jpaged.models.families.dbrx import DbrxFamily
from jpaged.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, MINICPM3, MISTRAL4, YOUTU
from jpaged.models.families.ernie_moe import ERNIE45_MOE
from jpaged.models.families.exaone4 import Exaone4Family
from jpaged.models.families.falcon import FalconFamily
from jpaged.models.families.falcon_h1 import FalconH1Family
from jpaged.models.families.gemma import GEMMA, GEMMA2, GEMMA3, VAULT_GEMMA
from jpaged.models.families.gemma3n import GEMMA3N
from jpaged.models.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from jpaged.models.families.glm import GLM, GLM4
from jpaged.models.families.gpt2 import GPT2Family, GPTBigCodeFamily, GPTNeoFamily
from jpaged.models.families.gpt_neox import GPTNeoXFamily
from jpaged.models.families.gpt_oss import GptOssFamily
from jpaged.models.families.gptj import CODEGEN, GPTJ
from jpaged.models.families.granite import (
    GRANITE,
    GRANITE_HYBRID,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    GRANITE_MOE_SWA,
    GRANITE_SWA,
    HYPERCLOVAX,
)
from jpaged.models.families.hunyuan import HUNYUAN, HUNYUAN_MOE
from jpaged.models.families.lfm2 import LFM2, LFM2_MOE
from jpaged.models.families.llama import (
    CWM,
    ERNIE45,
    HELIUM,
    INTERNLM3,
    IQUEST_CODER,
    LLAMA,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    QWEN2,
    QWEN3,
    SEED_OSS,
)
from jpaged.models.families.llama4 import Llama4Family
from jpaged.models.families.mamba2 import Mamba2Family
from jpaged.models.families.mimo import MIMO_V2_FLASH
from jpaged.models.families.mpt import MptFamily
from jpaged.models.families.nanochat import NanoChatFamily
from jpaged.models.families.nemotron import ARCEE, JAIS2, NEMOTRON
from jpaged.models.families.nemotron_h import NemotronHFamily
from jpaged.models.families.olmo import OLMO, OLMO2, OLMO3
from jpaged.models.families.olmo_hybrid import OlmoHybridFamily
from jpaged.models.families.opt import OPTFamily
from jpaged.models.families.phi import PhiFamily
from jpaged.models.families.phi3 import Phi3Family
from jpaged.models.families.phimoe import PhimoeFamily
from jpaged.models.families.qwen_hybrid import QWEN3_NEXT, QWEN35, QWEN35_MOE
from jpaged.models.families.smollm3 import SmolLM3Family
from jpaged.models.families.sparse_llama import (
    DOTS1,
    EXAONE_MOE,
    FLEX_OLMO,
    GLM4_MOE,
    MELLUM,
    MINIMAX_M2,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
    SOLAR_OPEN,
)
from jpaged.models.families.stablelm import StableLMFamily
from jpaged.models.families.starcoder2 import Starcoder2Family
from jpaged.models.registry import About, register

_LLAMA = About(
    "Llama",
    "Llama 2, 3; Falcon 3; Yi; SmolLM 2",
    "RMS norms; gated SiLU; RoPE linear, llama3, yarn, NTK, LongRoPE, proportional",
)
_MISTRAL = About(
    "Mistral",
    "Mistral 7B, NeMo, Small, Large; Ministral; of Mistral Small 3.1, 3.2 and 4 the text part",
    "as Llama; sliding windows",
)
_MINISTRAL3 = About(
    "Ministral 3", "3B, 8B, 14B; Devstral Small 2: the text part", "as Mistral; YaRN; temperature by position"
)
_LLAMA4 = About(
    "Llama 4",
    "Scout, Maverick: the text part",
    "experts that read weighted inputs, one shared; RoPE or none by layer; temperature by position; attention within"
    " chunks",
)
_QWEN = About("Qwen", "Qwen2, Qwen2.5, Qwen3", "as Llama; biases or norms of queries and keys; windows; tied head")
_QWEN_VL = About("Qwen-VL", "Qwen2-VL, Qwen2.5-VL, Qwen3-VL: the text part", "as Qwen")
_QWEN_VL_MOE = About("Qwen3-VL-MoE", "Qwen3-VL 30B-A3B, 235B-A22B: the text part", "as Qwen3-MoE")
_SEED_OSS = About("Seed-OSS", "36B, base and instruct", "as Llama; biases of q, k, v")
_ERNIE45 = About("ERNIE 4.5", "0.3B, base and post-trained", "as Llama; interleaved RoPE; tied head")
_ERNIE45_MOE = About(
    "ERNIE 4.5 MoE", "21B-A3B, 300B-A47B", "as ERNIE 4.5; experts chosen by a softmax with a correction; shared experts"
)
_HELIUM = About("Helium", "1-preview 2B", "as Llama; interleaved RoPE")
_CWM = About("CWM", "32B: base, SFT, RL", "as Llama; windows in three layers of four")
_INTERNLM3 = About("InternLM3", "8B", "as Llama")
_IQUEST_CODER = About("IQuest-Coder", "V1 7B, 14B, 40B", "as Llama")
_HUNYUAN = About("Hunyuan", "0.5B, 1.8B, 4B, 7B", "as Llama; norms of queries and keys after the rotation")
_HUNYUAN_MOE = About("Hunyuan MoE", "A13B", "as Hunyuan; experts, of which one is shared")
_GEMMA = About("Gemma", "Gemma 2B, 7B; CodeGemma", "norms times 1 + w; scaled embeddings; gated GELU; tied head")
_GEMMA2 = About("Gemma 2", "2B, 9B, 27B", "as Gemma; norms before and after; soft caps; windows in every second layer")
_VAULT_GEMMA = About("VaultGemma", "1B", "as Gemma 2; norms before attention and MLP alone")
_GEMMA3 = About(
    "Gemma 3",
    "270M, 1B, 4B, 12B, 27B; MedGemma; of multimodal checkpoints the text part",
    "as Gemma; norms before and after, of queries and keys; windows in five layers of six, with a RoPE of their own",
)
_GEMMA3N = About(
    "Gemma 3n",
    "E2B, E4B: of multimodal checkpoints the text part",
    "as Gemma 3; several residual streams (AltUp); a learned residual; embeddings for each layer; layers that share"
    " keys and values; in the first MLPs only the largest gates count",
)
_GEMMA4 = About(
    "Gemma 4",
    "E2B, E4B, 31B, 26B-A4B; of multimodal checkpoints the text part",
    "as Gemma 3; heads of two sizes; embeddings for each layer, layers that share keys and values; K = V; experts",
)
_GEMMA4_UNIFIED = About("Gemma 4 unified", "12B: the text part", "as Gemma 4 31B")
_MIMO_V2_FLASH = About(
    "MiMo-V2-Flash",
    "309B-A15B",
    "windows, sinks and more key-value heads in five layers of six; values narrower than keys, and scaled; RoPE on a"
    " third of a head; experts chosen by a sigmoid with a bias",
)
_PHI = About(
    "Phi-1, Phi-2",
    "Phi-1, Phi-1.5, Phi-2",
    "attention and MLP side by side; RoPE on half of a head; biases, of the head too",
)
_PHIMOE = About("Phi-3.5-MoE", "42B", "layer norms; two experts chosen by a sparse mixer; LongRoPE; biases")
_PHI3 = About(
    "Phi-3, Phi-4",
    "Phi-3-mini, Phi-3-medium, Phi-3.5-mini, Phi-4, Phi-4-mini",
    "joined q, k, v and gate, up; LongRoPE; partial RoPE; windows",
)
_OLMO = About("OLMo", "1B, 7B; 7B of April and July 2024", "as Llama; layer norms without weights; clipped q, k, v")
_OLMO2 = About("OLMo 2", "1B, 7B, 13B, 32B", "norms after, not before; norms over all queries and over all keys")
_OLMO3 = About("OLMo 3", "7B, 32B", "as OLMo 2; windows in three layers of four; YaRN in the others")
_OLMO_HYBRID = About(
    "OLMo Hybrid",
    "7B: base, SFT, DPO, Think",
    "gated delta nets in three layers of four; attention as OLMo 3, without RoPE or windows",
)
_FLEX_OLMO = About("FlexOlmo", "7x7B", "as OLMo 2; experts")
_EXAONE4 = About(
    "EXAONE 4.0",
    "1.2B, 32B",
    "norms after, not before, and of each query and key; windows and RoPE in three layers of four, none in the others",
)
_EXAONE_MOE = About(
    "K-EXAONE",
    "236B-A23B",
    "norms of queries and keys; experts chosen by a sigmoid with a bias; windows and RoPE in three layers of four",
)
_GRANITE = About("Granite 3", "3.0 to 3.3: 2B, 8B", "multipliers of embeddings, scores, residuals and logits")
_GRANITE_SWA = About(
    "Granite SWA", "2B", "as Granite 3; attention sinks; windows in three layers of four; a RoPE or none for each layer"
)
_HYPERCLOVAX = About("HyperCLOVA X", "SEED Think 14B", "as Granite 3; norms before and after")
_GRANITE_MOE = About("Granite 3 MoE", "3.0, 3.1: 1B-A400M, 3B-A800M", "as Granite 3; experts, one shared or none")
_GRANITE_MOE_SWA = About("Granite MoE SWA", "3B-A600M", "as Granite SWA; experts, one shared or none")
_GRANITE4 = About(
    "Granite 4",
    "4.0: Micro, 350M, 1B; H-Micro, H-Tiny, H-Small, H-350M, H-1B",
    "as Granite 3; joined gate, up; RoPE or none; experts, of which one is shared; Mamba-2 in nine layers of ten (H)",
)
_BAMBA = About("Bamba", "9B v1, v2", "as Llama; Mamba-2 in most layers; RoPE on half of a head in the others")
_SMOLLM3 = About("SmolLM3", "3B", "no RoPE in every fourth layer; tied head")
_GLM = About(
    "GLM-4, 2024", "glm-4-9b-hf, GLM-Edge", "RoPE on half of a head, interleaved; biases of q, k, v; joined gate, up"
)
_GLM4 = About("GLM-4, 2025", "GLM-4-0414, GLM-Z1: 9B, 32B", "as GLM-4, 2024; norms before and after")
_COHERE = About(
    "Command R",
    "Command R, R+; Aya 23, Aya Expanse",
    "attention and MLP side by side; norms without bias; interleaved RoPE; norms of each head; scaled logits",
)
_COHERE2 = About(
    "Command A", "Command R7B, A", "as Command R; windows and RoPE in three layers of four, none in the others"
)
_COHERE2_MOE = About(
    "North",
    "North Mini Code 30B-A3B",
    "as Command A; experts chosen by a sigmoid or a softmax, some shared or none; MLPs in the first layers;"
    " RMS or layer norms",
)
_STABLELM = About(
    "StableLM",
    "3B-4E1T, Zephyr 3B, Stable Code 3B, StableLM 2 1.6B and 12B",
    "layer norms; partial RoPE; attention and MLP side by side or not; norms of each head",
)
_STARCODER2 = About("StarCoder2", "3B, 7B, 15B", "layer norms; plain MLPs; biases; windows")
_FALCON = About(
    "Falcon",
    "RW-1B, 7B, 40B, 180B, Falcon2-11B",
    "attention and MLP side by side; one key-value head or several; ALiBi (RW)",
)
_FALCON_H1 = About(
    "Falcon-H1",
    "0.5B, 1.5B, 1.5B-Deep, 3B, 7B, 34B",
    "Mamba-2 and attention side by side in every layer; multipliers of what the parts read and give",
)
_NEOX = About(
    "GPT-NeoX, Pythia",
    "Pythia 14M to 12B; GPT-NeoX-20B; RedPajama-INCITE; Dolly 2",
    "attention and MLP side by side or not; partial RoPE; biases",
)
_GPTJ = About("GPT-J", "6B", "attention and MLP side by side; interleaved partial RoPE; head with a bias")
_CODEGEN = About("CodeGen", "350M, 2B, 6B, 16B: nl, multi, mono", "as GPT-J; joined q, k, v")
_BLOOM = About("BLOOM", "560M to 176B; BLOOMZ", "ALiBi; norm of the embeddings; biases")
_MAMBA2 = About("Mamba-2", "Codestral Mamba 7B; Mamba-2 130M to 2.7B", "Mamba-2 in every layer, no attention")
_MPT = About("MPT", "7B, 30B", "ALiBi; norms without bias; clipped q, k, v")
_MIXTRAL = About("Mixtral", "8x7B, 8x22B", "as Mistral; a router and experts in place of each MLP")
_DBRX = About("DBRX", "132B-A36B: base, instruct", "as Mixtral; norms without bias; clipped q, k, v; joined q, k, v")
_OLMOE = About("OLMoE", "1B-7B", "as Mixtral; norms over all queries and over all keys")
_MINIMAX_M2 = About(
    "MiniMax-M2",
    "M2, M2.1",
    "as OLMoE; experts chosen by a sigmoid with a bias; RoPE on half of a head",
)
_SOLAR_OPEN = About("Solar Open", "100B", "as Llama; experts chosen by a sigmoid with a bias; a shared expert; YaRN")
_QWEN2_MOE = About("Qwen2-MoE", "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B", "as Qwen2; experts, of which one is shared")
_MELLUM = About("Mellum 2", "12B-A2.5B", "as Qwen3-MoE; windows in some layers, with a RoPE of their own")
_QWEN3_MOE = About("Qwen3-MoE", "30B-A3B, 235B-A22B", "as Qwen3; experts in all or some layers")
_DOTS1 = About("dots.llm1", "dots.llm1", "as Qwen3; experts chosen by a sigmoid with a bias, in groups; shared experts")
_GPT_OSS = About(
    "gpt-oss",
    "gpt-oss-20b, gpt-oss-120b",
    "experts with biases and clamped SwiGLU, in MXFP4 or not; attention sinks; windows in every second layer; YaRN",
)
_QWEN3_NEXT = About(
    "Qwen3-Next",
    "80B-A3B",
    "gated delta nets in three layers of four; attention with a gate; RoPE on a quarter of a head; norms times 1 + w;"
    " experts, of which one is shared",
)
_QWEN35 = About("Qwen3.5", "0.8B to 27B; of multimodal checkpoints the text part", "as Qwen3-Next; MLPs; tied head")
_QWEN35_MOE = About(
    "Qwen3.5-MoE",
    "35B-A3B, 122B-A10B, 397B-A17B; Qwen3.6-35B-A3B; of multimodal checkpoints the text part",
    "as Qwen3-Next",
)
_GLM4_MOE = About(
    "GLM-4.5",
    "GLM-4.5, 4.5-Air, 4.6",
    "as dots.llm1; RoPE on half of a head; biases of q, k, v; norms of each head or none",
)
_DEEPSEEK_V2 = About(
    "DeepSeek-V2",
    "DeepSeek-V2, V2.5, V2-Lite; DeepSeek-Coder-V2",
    "latent attention (MLA); experts chosen by a softmax, in groups or not; shared experts; YaRN",
)
_DEEPSEEK_V3 = About(
    "DeepSeek-V3",
    "DeepSeek-V3, V3.1, R1; Kimi K2; Moonlight; of Kimi K2.5, K2.6 and Kimi-VL the text part",
    "as DeepSeek-V2; experts chosen by a sigmoid with a bias, in groups",
)
_GLM47_FLASH = About(
    "GLM-4.7-Flash", "30B-A3B", "as DeepSeek-V3; every layer but the first has experts, or as config.json says"
)
_MISTRAL4 = About(
    "Mistral 4", "Mistral Small 4: the text part", "as DeepSeek-V2; temperature by position; experts renormalised"
)
_MINICPM3 = About(
    "MiniCPM3", "4B", "latent attention as DeepSeek-V2; MLPs; LongRoPE; scaled embeddings, residuals and logits"
)
_YOUTU = About("Youtu-LLM", "2B", "latent attention as DeepSeek-V3; MLPs; tied head")
_LFM2 = About(
    "LFM2",
    "LFM2 and LFM2.5: 350M, 700M, 1.2B, 2.6B",
    "gated short convolutions in most layers; norms of queries and keys; tied head",
)
_LFM2_MOE = About("LFM2-MoE", "LFM2-8B-A1B", "as LFM2; experts chosen by a sigmoid with a bias, in all layers but two")
_NEMOTRON_H = About(
    "Nemotron-H",
    "Nemotron-H 8B, 47B, 56B; Nemotron Nano 2 9B, 12B; Nemotron 3 Nano, Super",
    "Mamba-2, attention without RoPE, MLPs and experts, each a layer; squared ReLU without gates",
)
_NEMOTRON = About(
    "Nemotron-4, Minitron",
    "Nemotron-Mini-4B, Minitron 4B and 8B, Nemotron-4 15B and 340B",
    "layer norms times 1 + w; RoPE on half of a head; squared ReLU without gates",
)
_JAIS2 = About("Jais 2", "8B, 70B", "as Llama; layer norms; squared ReLU without gates; biases")
_ARCEE = About("AFM", "4.5B, base and instruct", "as Llama; squared ReLU without gates")
_APERTUS = About("Apertus", "8B, 70B", "as Llama; norms of queries and keys; xIELU without gates")
_AFMOE = About(
    "AFMoE",
    "Trinity Nano, Mini, Large",
    "norms before and after, of queries and keys; attention with a gate; windows and RoPE in three layers of four, none"
    " in the others; experts chosen by a sigmoid with a bias, some shared",
)
_NANOCHAT = About(
    "nanochat",
    "d20, d32",
    "norms without weights; RoPE backwards; squared ReLU without gates; soft-capped logits",
)
_OPT = About("OPT", "125M to 66B", "learned positions; norms before or after; projected embeddings (350M)")
_GPT_NEO = About("GPT-Neo", "125M, 1.3B, 2.7B", "as GPT-2; windows in every second layer; scores not scaled")
_GPT2 = About("GPT-2", "124M to 1.5B; CodeParrot", "learned positions; joined q, k, v; scores scaled by layer")
_GPT_BIGCODE = About(
    "StarCoder", "StarCoder 1B to 15B, SantaCoder, StarCoderBase, StarChat", "as GPT-2; one key-value head"
)

register("LlamaForCausalLM", LLAMA, _LLAMA)
register("Llama4ForCausalLM", Llama4Family(), _LLAMA4)
register("Llama4ForConditionalGeneration", Llama4Family(), _LLAMA4)
register("MistralForCausalLM", MISTRAL, _MISTRAL)
register("MinistralForCausalLM", MINISTRAL, _MISTRAL)
register("Ministral3ForCausalLM", MINISTRAL3, _MINISTRAL3)
register("Mistral3ForConditionalGeneration", MISTRAL, _MISTRAL)
register("Qwen2ForCausalLM", QWEN2, _QWEN)
register("Qwen3ForCausalLM", QWEN3, _QWEN)
register("Qwen2VLForConditionalGeneration", QWEN2, _QWEN_VL)
register("Qwen2_5_VLForConditionalGeneration", QWEN2, _QWEN_VL)
register("Qwen3VLForConditionalGeneration", QWEN3, _QWEN_VL)
register("Qwen3VLMoeForConditionalGeneration", QWEN3_MOE, _QWEN_VL_MOE)
register("SeedOssForCausalLM", SEED_OSS, _SEED_OSS)
register("Ernie4_5ForCausalLM", ERNIE45, _ERNIE45)
register("HeliumForCausalLM", HELIUM, _HELIUM)
register("CwmForCausalLM", CWM, _CWM)
register("InternLM3ForCausalLM", INTERNLM3, _INTERNLM3)
register("IQuestCoderForCausalLM", IQUEST_CODER, _IQUEST_CODER)
register("Ernie4_5_MoeForCausalLM", ERNIE45_MOE, _ERNIE45_MOE)
register("HunYuanDenseV1ForCausalLM", HUNYUAN, _HUNYUAN)
register("HunYuanMoEV1ForCausalLM", HUNYUAN_MOE, _HUNYUAN_MOE)
register("MiMoV2FlashForCausalLM", MIMO_V2_FLASH, _MIMO_V2_FLASH)
register("GemmaForCausalLM", GEMMA, _GEMMA)
register("Gemma2ForCausalLM", GEMMA2, _GEMMA2)
register("VaultGemmaForCausalLM", VAULT_GEMMA, _VAULT_GEMMA)
register("Gemma3ForCausalLM", GEMMA3, _GEMMA3)
register("Gemma3ForConditionalGeneration", GEMMA3, _GEMMA3)
register("Gemma3nForCausalLM", GEMMA3N, _GEMMA3N)
register("Gemma3nForConditionalGeneration", GEMMA3N, _GEMMA3N)
register("Gemma4ForCausalLM", GEMMA4, _GEMMA4)
register("Gemma4ForConditionalGeneration", GEMMA4, _GEMMA4)
register("Gemma4UnifiedForCausalLM", GEMMA4_UNIFIED, _GEMMA4_UNIFIED)
register("Gemma4UnifiedForConditionalGeneration", GEMMA4_UNIFIED, _GEMMA4_UNIFIED)
register("PhiForCausalLM", PhiFamily(), _PHI)
register("Phi3ForCausalLM", Phi3Family(), _PHI3)
register("PhimoeForCausalLM", PhimoeFamily(), _PHIMOE)
register("PhiMoEForCausalLM", PhimoeFamily(), _PHIMOE)  # as the published config.json has it
register("OlmoForCausalLM", OLMO, _OLMO)
register("Olmo2ForCausalLM", OLMO2, _OLMO2)
register("Olmo3ForCausalLM", OLMO3, _OLMO3)
register("OlmoHybridForCausalLM", OlmoHybridFamily(), _OLMO_HYBRID)
register("Exaone4ForCausalLM", Exaone4Family(), _EXAONE4)
register("GraniteForCausalLM", GRANITE, _GRANITE)
register("GraniteSWAForCausalLM", GRANITE_SWA, _GRANITE_SWA)
register("HyperCLOVAXForCausalLM", HYPERCLOVAX, _HYPERCLOVAX)
register("GraniteMoeForCausalLM", GRANITE_MOE, _GRANITE_MOE)
register("GraniteMoeSharedForCausalLM", GRANITE_MOE_SHARED, _GRANITE_MOE)
register("GraniteMoeSWAForCausalLM", GRANITE_MOE_SWA, _GRANITE_MOE_SWA)
register("GraniteMoeHybridForCausalLM", GRANITE_HYBRID, _GRANITE4)
register("BambaForCausalLM", BambaFamily(), _BAMBA)
register("SmolLM3ForCausalLM", SmolLM3Family(), _SMOLLM3)
register("GlmForCausalLM", GLM, _GLM)
register("Glm4ForCausalLM", GLM4, _GLM4)
register("CohereForCausalLM", COHERE, _COHERE)
register("Cohere2ForCausalLM", COHERE2, _COHERE2)
register("Cohere2MoeForCausalLM", COHERE2_MOE, _COHERE2_MOE)
register("StableLmForCausalLM", StableLMFamily(), _STABLELM)
register("Starcoder2ForCausalLM", Starcoder2Family(), _STARCODER2)
register("FalconForCausalLM", FalconFamily(), _FALCON)
register("FalconH1ForCausalLM", FalconH1Family(), _FALCON_H1)
register("GPTNeoXForCausalLM", GPTNeoXFamily(), _NEOX)
register("GPTJForCausalLM", GPTJ, _GPTJ)
register("CodeGenForCausalLM", CODEGEN, _CODEGEN)
register("BloomForCausalLM", BloomFamily(), _BLOOM)
register("Mamba2ForCausalLM", Mamba2Family(), _MAMBA2)
register("MptForCausalLM", MptFamily(), _MPT)
register("MPTForCausalLM", MptFamily(), _MPT)  # as MosaicML's own checkpoints have it
register("Lfm2ForCausalLM", LFM2, _LFM2)
register("Lfm2MoeForCausalLM", LFM2_MOE, _LFM2_MOE)
register("NemotronHForCausalLM", NemotronHFamily(), _NEMOTRON_H)
register("NemotronForCausalLM", NEMOTRON, _NEMOTRON)
register("Jais2ForCausalLM", JAIS2, _JAIS2)
register("ArceeForCausalLM", ARCEE, _ARCEE)
register("ApertusForCausalLM", ApertusFamily(), _APERTUS)
register("AfmoeForCausalLM", AfmoeFamily(), _AFMOE)
register("NanoChatForCausalLM", NanoChatFamily(), _NANOCHAT)
register("OPTForCausalLM", OPTFamily(), _OPT)
register("GPT2LMHeadModel", GPT2Family(), _GPT2)
register("GPTBigCodeForCausalLM", GPTBigCodeFamily(), _GPT_BIGCODE)
register("GPTNeoForCausalLM", GPTNeoFamily(), _GPT_NEO)
register("MixtralForCausalLM", MIXTRAL, _MIXTRAL)
register("DbrxForCausalLM", DbrxFamily(), _DBRX)
register("OlmoeForCausalLM", OLMOE, _OLMOE)
register("FlexOlmoForCausalLM", FLEX_OLMO, _FLEX_OLMO)
register("MiniMaxM2ForCausalLM", MINIMAX_M2, _MINIMAX_M2)
register("Qwen2MoeForCausalLM", QWEN2_MOE, _QWEN2_MOE)
register("Qwen3MoeForCausalLM", QWEN3_MOE, _QWEN3_MOE)
register("MellumForCausalLM", MELLUM, _MELLUM)
register("Dots1ForCausalLM", DOTS1, _DOTS1)
register("SolarOpenForCausalLM", SOLAR_OPEN, _SOLAR_OPEN)
register("ExaoneMoEForCausalLM", EXAONE_MOE, _EXAONE_MOE)
register("ExaoneMoeForCausalLM", EXAONE_MOE, _EXAONE_MOE)  # as transformers calls it
register("Glm4MoeForCausalLM", GLM4_MOE, _GLM4_MOE)
register("DeepseekV2ForCausalLM", DEEPSEEK_V2, _DEEPSEEK_V2)
register("DeepseekV3ForCausalLM", DEEPSEEK_V3, _DEEPSEEK_V3)
register("KimiK25ForConditionalGeneration", DEEPSEEK_V3, _DEEPSEEK_V3)
register("Kimi_K25ForConditionalGeneration", DEEPSEEK_V3, _DEEPSEEK_V3)  # as transformers calls it
register("KimiVLForConditionalGeneration", DEEPSEEK_V3, _DEEPSEEK_V3)
register("MiniCPM3ForCausalLM", MINICPM3, _MINICPM3)
register("YoutuForCausalLM", YOUTU, _YOUTU)
register("Mistral4ForCausalLM", MISTRAL4, _MISTRAL4)
register("Glm4MoeLiteForCausalLM", GLM4_MOE_LITE, _GLM47_FLASH)
register("GptOssForCausalLM", GptOssFamily(), _GPT_OSS)
register("Qwen3NextForCausalLM", QWEN3_NEXT, _QWEN3_NEXT)
register("Qwen3_5ForCausalLM", QWEN35, _QWEN35)
register("Qwen3_5ForConditionalGeneration", QWEN35, _QWEN35)
register("Qwen3_5MoeForCausalLM", QWEN35_MOE, _QWEN35_MOE)
register("Qwen3_5MoeForConditionalGeneration", QWEN35_MOE, _QWEN35_MOE)
