"""A feature that the decoder lacks, for each architecture that transformers supports and loramux does not."""

from __future__ import annotations

_BY_FEATURE: dict[str, str] = {
    "its kind of router, shared experts or expert layout": """
        AfmoeForCausalLM AriaForConditionalGeneration AriaTextForCausalLM BeamForCausalLM Cohere2MoeForCausalLM
        DbrxForCausalLM DeepseekOcr2ForConditionalGeneration Ernie4_5_VLMoeForConditionalGeneration
        FlintForCausalLM HYV3ForCausalLM
        HunYuanMoEV1ForCausalLM JetMoeForCausalLM Kolibri1ForCausalLM LagunaForCausalLM MiMoV2FlashForCausalLM
        MiniMaxM3SparseForConditionalGeneration MiniMaxM3VLForCausalLM MuseSparkForConditionalGeneration
        PhimoeForCausalLM Qwen3OmniMoeThinkerForConditionalGeneration
        Step3p7ForConditionalGeneration UnlimitedOcrForConditionalGeneration
    """,
    "latent attention (MLA)": """
        AXK1ForCausalLM AXK2ForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM
        Dots3NoteForCausalLM Dots3NoteForConditionalGeneration Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM
        HYV4ForCausalLM Kimi_K25ForConditionalGeneration LongcatFlashForCausalLM MiniCPM3ForCausalLM
        Mistral4ForCausalLM MistralLarge4ForConditionalGeneration YoutuForCausalLM
    """,
    "compressed sparse attention": "DeepseekV4ForCausalLM",
    "layers with a recurrent state, such as Mamba or linear attention": """
        BailingHybridForCausalLM BambaForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM
        Glm5NextForConditionalGeneration JambaForCausalLM KimiLinearForCausalLM
        Mamba2ForCausalLM MambaForCausalLM MiniCPMOcrForConditionalGeneration MiniCPMV4_6ForConditionalGeneration
        MiniCPMV4_7ForConditionalGeneration MiniMaxForCausalLM NemotronHForCausalLM NemotronH_Omni_Reasoning_V3
        OlmoHybridForCausalLM Qwen3NextForCausalLM
        Qwen4ExpForCausalLM Qwen4ExpForConditionalGeneration RecurrentGemmaForCausalLM RwkvForCausalLM
        Zamba2ForCausalLM ZambaForCausalLM xLSTMForCausalLM
    """,
    "convolutions over positions": """
        InklingForCausalLM InklingForConditionalGeneration Inkling2ForCausalLM Inkling2ForConditionalGeneration
        Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm2VlForConditionalGeneration Lfm3ForCausalLM
        Lfm3VlForConditionalGeneration ZayaForCausalLM
    """,
    "an encoder or cross-attention": """
        BartForCausalLM BigBirdPegasusForCausalLM BlenderbotForCausalLM BlenderbotSmallForCausalLM
        BlipForConditionalGeneration EvollaForProteinText2Text Florence2ForConditionalGeneration
        IdeficsForVisionText2Text MBartForCausalLM MarianForCausalLM MllamaForCausalLM
        MllamaForConditionalGeneration MusicgenForCausalLM MusicgenMelodyForCausalLM MvpForCausalLM
        PLBartForCausalLM PPFormulaNetForConditionalGeneration PegasusForCausalLM Pix2StructForConditionalGeneration
        ProphetNetForCausalLM T5Gemma2ForConditionalGeneration TrOCRForCausalLM UdopForConditionalGeneration
        VisionEncoderDecoderModel WhisperForCausalLM
    """,
    "absolute positions": """
        BertGenerationDecoder BertLMHeadModel BigBirdForCausalLM BioGptForCausalLM Blip2ForConditionalGeneration
        CTRLLMHeadModel CamembertForCausalLM Data2VecTextForCausalLM ElectraForCausalLM ErnieForCausalLM
        GPT2LMHeadModel GPTBigCodeForCausalLM GPTNeoForCausalLM GitForCausalLM InstructBlipForConditionalGeneration
        InstructBlipVideoForConditionalGeneration Kosmos2ForConditionalGeneration Kosmos2_5ForConditionalGeneration
        MegatronBertForCausalLM OPTForCausalLM OpenAIGPTLMHeadModel ReformerModelWithLMHead RemBertForCausalLM
        RoCBertForCausalLM RobertaForCausalLM RobertaPreLayerNormForCausalLM XGLMForCausalLM XLMRobertaForCausalLM
        XLMRobertaXLForCausalLM XLMWithLMHeadModel XmodForCausalLM
    """,
    "position biases in attention": "BloomForCausalLM CpmAntForCausalLM MptForCausalLM XLNetLMHeadModel",
    "norms after the residual": "RoFormerForCausalLM",
    "a linear layer that interleaves q, k and v by head": """
        FalconForCausalLM FuyuForCausalLM GPTNeoXForCausalLM GPTNeoXJapaneseForCausalLM PersimmonForCausalLM
    """,
    "GPT-J's names of tensors and configuration fields": "CodeGenForCausalLM GPTJForCausalLM",
    "layer norms of q and k": "ChameleonForConditionalGeneration",
    "rotary embeddings with an axis for images": "HunYuanVLForConditionalGeneration",
    "K and V that another model computes": "Gemma4AssistantForCausalLM Gemma4UnifiedAssistantForCausalLM",
    "block diffusion": "DiffusionGemmaForBlockDiffusion",
    "differential attention": "DiffLlamaForCausalLM",
    "dynamic attention masks": "DogeForCausalLM",
    "layers that run several times": "HrmTextForCausalLM",
    "a gate with the exact GELU": "ModernBertDecoderForCausalLM",
    "ternary weights": "BitNetForCausalLM",
    "byte patches": "BltForCausalLM",
    "a decoder of audio codes": "MoshiForCausalLM",
    "a decoder of robot actions": "PI0ForConditionalGeneration",
    "adapters that the model applies to images itself": "Phi4MultimodalForCausalLM",
    "a norm of the embeddings": "MuseGlimmerForConditionalGeneration NanoChatForCausalLM",
    "bidirectional attention over the prompt": "PaliGemmaForConditionalGeneration",
    "separate rotary settings for each kind of layer in a Cohere 2 decoder": """
        CohereCompassForCausalLM CohereCompassForConditionalGeneration
    """,
    "an embedding in two tensors": "Molmo2ForConditionalGeneration",
    "text decoder tensors without a common prefix": """
        Cosmos3EdgeForConditionalGeneration Cosmos3OmniForConditionalGeneration PaddleOCRVLForConditionalGeneration
    """,
    "a second vision tower": "DeepseekVLHybridForConditionalGeneration",
    "a decoder of image tokens": "Emu3ForCausalLM Emu3ForConditionalGeneration JanusForConditionalGeneration",
    "a layer that predicts several tokens": "GlmOcrForConditionalGeneration",
    "image features that are added in several layers": """
        Granite4VisionForConditionalGeneration GraniteDoclingForConditionalGeneration
    """,
    "an audio tower": """
        MossTranscribeDiarizeForConditionalGeneration Qwen2_5OmniThinkerForConditionalGeneration
    """,
    "a vision tower that needs timm": "PerceptionLMForConditionalGeneration",
    "tensor names that transformers changes when it saves the model": "QianfanOCRForConditionalGeneration",
}

MISSING_FEATURES: dict[str, str] = {
    architecture: feature for feature, names in _BY_FEATURE.items() for architecture in names.split()
}
"""A feature that the decoder lacks, by architecture. The decoder may lack further features of the architecture."""
