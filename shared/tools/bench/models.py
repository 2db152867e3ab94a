"""Shapes of attention in families of models: head sizes, query heads per KV head, windows.

The families are all model types of transformers 5.24.0. Their shapes are the defaults of its
configuration classes, of text, vision and audio parts alike, so some are those of no checkpoint.
A type whose name begins with that of another one of the same shape is left out. CHECKPOINTS has
shapes of well-known weights that differ from the defaults.
"""

from typing import NamedTuple


class ModelShape(NamedTuple):
    """One shape of attention.

    Args:
        key_size, value_size: head size of queries and keys, and of values.
        group: query heads per KV head.
        window: keys of a sliding window or of a chunk, as the configuration counts them; 0 without.
            Most models with a window have other layers without one.
        names: model types, or checkpoints.
    """

    key_size: int
    value_size: int
    group: int
    window: int
    names: tuple[str, ...]


# key size, value size, query heads per KV head, window: model types
_FAMILIES = """
8 8 1 0: bloom
15 15 1 0: pp_ocrv5_mobile_rec pp_ocrv5_server_rec pp_ocrv6_small_rec
16 16 1 0: lw_detr
21 21 1 0: reformer
32 32 1 0: autoformer blenderbot-small conditional_detr d_fine dab-detr deformable_detr deimv2
  detr edgetam efficientloftr esmfold2 grounding-dino informer mask2former maskformer
  mm-grounding-dino omdet-turbo oneformer patchtst pp_doclayout_v2 pp_doclayout_v3
  pp_doclayout_v4 pp_formulanet rt_detr sam sam2 sam3 table-transformer time_series_transformer
36 36 1 0: moonshine
40 40 1 0: moonshine_streaming
42 42 12 0: glm4_moe glm4v_moe
48 48 1 0: esmfold2 idefics llama4
64 64 1 0: EvollaModel albert align altclip audio-spectrogram-transformer audioflamingo3 bark
  bart beit bert bert-generation big_bird bigbird_pegasus biogpt blip blip-2 blt bridgetower
  bros camembert canine chinese_clip chmv2 clap clip clipseg clvp colmodernvbert convbert
  data2vec-audio data2vec-text data2vec-vision deberta deberta-v2 deepseek_ocr2 deepseek_vl deit
  depth_anything depth_pro diffllama dinov2 dinov3_vit distilbert dots3_note_audio_encoder
  dots3_note_vision_encoder dpr dpt electra encoder-decoder eomt ernie esm esmc esmfold2
  eurobert evolla flava florence2 fsmt funnel fuyu gemma3 gemma4_vision git glm5_next glm_ocr
  glmasr got_ocr2 gpt-sw3 gpt2 gradium_phonon_tts granite4_vision granite_docling granite_speech
  grounding-dino groupvit gte higgs_audio_v2_tokenizer hubert ibert idefics2 ijepa imagegpt
  inkling2 inkling_mm_model inkling_vision instructblip instructblipvideo internvl janus
  jina_embeddings_v3 kosmos-2 kosmos_2_5_vision_model kosmos_2_text_model kosmos_2_vision_model
  lasr_ctc lasr_encoder layoutlm layoutlmv2 layoutlmv3 layoutxlm lfm2_vl lightglue lighton_ocr
  lilt llava longt5 luke lw_detr_vit lxmert m2m_100 mamba2 marian markuplm mbart megatron-bert
  metaclip_2 mgp-str minicpm_ocr minicpmv4_6 minicpmv4_7 mistral3 mm-grounding-dino modernvbert
  moss_transcribe_diarize mpnet mra mt5 musicflamingo musicgen mvp nemo_speechlm
  nemotron3_5_transcribe_audio nemotron3_diarization neucodec nllb-moe nomic_bert nystromformer
  omdet-turbo omniasr openai-gpt opt owlv2 owlvit pegasus persimmon phi phi4_multimodal
  pix2struct pixtral plbart pocket_tts pop2piano pp_chart2table pp_doclayout_v2 pp_formulanet
  prompt_depth_anything prophetnet qianfan_ocr qwen2_5_omni qwen2_audio qwen3_asr qwen3_omni_moe
  rag rembert rf_detr roberta roberta-prelayernorm roc_bert roformer sam sam3 sapiens2
  seamless_m4t seggpt sew sew-d shieldgemma2 siglip siglip2 slanext speech-encoder-decoder
  speech_to_text speecht5 splinter squeezebert superglue switch_transformers t5 t5gemma2 tapas
  timesformer tipsv2 trocr tvp udop ultravbert umt5 unispeech unispeech-sat unlimited_ocr
  video_llama_3 video_llava videomae videomt videoprism vilt vipllava vision-encoder-decoder
  vision-text-dual-encoder visual_bert vit vitdet vitmatte vitpose vivit vjepa2 voxtral wav2vec2
  wav2vec2-bert wav2vec2-conformer wavlm whisper xclip xcodec xcodec2 xglm xlm-roberta xlnet
  xmod yolos yoso zoedepth
64 64 1 8: moshi
64 64 1 64: colmodernvbert modernbert modernbert-decoder modernvbert pe_audio pe_video
64 64 1 72: qwen3_omni_moe
64 64 1 250: csm kyutai_speech_to_text mimi moshi pocket_tts_audio_tokenizer
64 64 1 375: kyutai_speech_to_text
64 64 1 512: blt led longformer
64 64 1 750: voxtral_realtime
64 64 2 0: glm_ocr lfm3_vl
64 64 4 0: csm granite_docling lfm2_moe neomme
64 64 4 256: neomme
64 64 4 1024: neomme
64 64 7 128: openai_privacy_filter
64 64 8 0: qwen3_moe qwen3_omni_moe
64 64 8 128: gpt_oss
64 64 8 2048: muse_spark
64 64 12 0: gpt_bigcode
64 64 16 0: sarvam_moe
64 64 71 0: falcon
72 72 1 0: aria cohere_compass colpali cosmos3_edge cosmos3_omni hunyuan_vl idefics3 kimi_k25
  llava_onevision molmo2 paddleocr_vl paligemma phi4_multimodal pi0 qwen3_5 qwen3_omni_moe
  qwen3_vl qwen4_exp smolvlm
73 73 7 0: qwen3_omni_moe
80 80 1 0: arcee blenderbot colqwen2 ctrl ernie4_5_vl_moe gpt_neox_japanese minimax_m3_vl mllama
  nemo_speechlm nemotron3_5_transcribe_word_timestamp nemotron_h_omni pixio qwen2_vl radio
  stablelm timesfm timesfm2_5 xlm-roberta-xl
80 80 4 0: lfm2
82 82 1 0: aya_vision
88 88 1 0: blip-2 blip_2_vision_model instructblip instructblipvideo
96 64 1 0: axk2 minicpm3
96 96 1 0: blip cohere2_vision edgetam_video glm_image gpt_neox hy_v4_vl kosmos-2
  kosmos_2_5_text_model muse_glimmer muse_spark phi3 sam2 step3p5_vision step3p7 vits
96 96 4 0: phi4_multimodal
104 104 1 0: mlcd
128 128 1 0: aimv2 apertus apertus1p5 aria audioflamingo3 blt canary chameleon cohere
  cosmos3_omni cpmant decision_transformer deepseek_ocr2 deepseek_vl dia doge flaubert flex_olmo
  fun_asr_nano glm46v glm4v glmga gpt_neo granite granite4_vision granitemoe granitemoehybrid
  granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hyperclovax
  idefics idefics3 internvl jais2 janus llama llava mistral4 mistral_large4 mobilebert mpt
  musicflamingo nanochat nemo_speechlm nemotron nemotron3_5_transcribe_asr_audio
  nemotron3_5_transcribe_audio olmo olmo2 olmoe ovis2 parakeet_ctc parakeet_encoder
  parakeet_rnnt parakeet_tdt pe_audio pe_video perception_lm qianfan_ocr qwen2 qwen3 smolvlm
  vibevoice video_llama_3 video_llava vipllava xlm
128 128 1 12: gemma4_audio
128 128 1 71: nemotron3_5_asr nemotron_asr_streaming
128 128 1 128: granitemoe_swa ultrabert ultravbert unlimited_ocr
128 128 1 1024: afmoe
128 128 1 3000: moshi
128 128 1 4096: aya_vision cohere2 cohere_compass exaone4 exaone_moe olmo3
128 128 2 0: cosmos3_edge fun_asr_nano jetmoe lighton_ocr moss_transcribe_diarize qwen3_asr
  qwen3_omni_moe
128 128 3 0: higgs_audio_v2
128 128 3 1024: inkling2_loop
128 128 4 0: EvollaModel bamba bitnet csm dia emu3 evolla exaone falcon_h1 glmasr jamba minimax
  ministral3 mistral3 mixtral mllama molmo2 nemotron_h phimoe smollm3 voxtral zaya
128 128 4 256: lfm3
128 128 4 512: lara_mini
128 128 4 2048: muse_glimmer_assistant
128 128 4 4096: idefics2 ministral mistral voxtral_realtime_text
128 128 4 8192: voxtral_realtime
128 128 5 0: ernie4_5_moe ernie4_5_vl_moe iquestcoder
128 128 5 128: granite_swa
128 128 5 8192: llama4
128 128 6 0: minimax_m2
128 128 6 512: beam laguna
128 128 6 1024: inkling2
128 128 6 8192: cwm
128 128 7 0: fast_vlm qwen2_5_omni
128 128 8 0: colqwen2 ernie4_5 hy_v3 paddleocr_vl qwen2_5_vl qwen2_vl solar_open step3p5 step3p7
128 128 8 512: inkling_mm_model inkling_text
128 128 8 513: flint
128 128 8 1024: mellum
128 128 10 0: seed_oss
128 128 12 0: starcoder2
128 128 12 513: kolibri1
128 128 16 0: dbrx glm glm4 glm46v glm4v glmga internlm3 minimax_m3_vl nemo_speechlm
128 128 16 2048: muse_glimmer
144 144 1 4096: dots1
160 160 1 0: cohere_asr zamba2
192 128 1 0: axk1 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 kimi_k25 kimi_linear
  longcat_flash sarvam_mla youtu
192 128 16 129: mimo_v2_flash
192 192 1 0: fastspeech2_conformer
224 224 1 0: hyperclovax_vision_v2 qwen2_5_omni qwen2_5_vl
224 224 2 0: exaone4_5
256 256 1 0: codegen gemma glm4_moe_lite glm5_next glm_moe_dsa gptj hy_v4
256 256 1 512: dots3_note
256 256 1 2048: recurrent_gemma
256 256 2 512: diffusion_gemma embedding_gemma2 gemma4
256 256 2 1024: gemma4_unified
256 256 2 4096: gemma2 gemma3 shieldgemma2 t5_gemma_module t5gemma t5gemma2 vaultgemma
256 256 4 0: jev minicpm_ocr minicpmv4_6 minicpmv4_7 qwen3_5
256 256 4 512: gemma3n
256 256 4 1024: dory
256 256 8 0: colpali paligemma pi0 qwen3_5_moe qwen3_next qwen4_exp
464 464 1 0: zamba
512 512 1 0: omniasr xlstm
512 512 2 0: diffusion_gemma gemma4
512 512 4 0: embedding_gemma2
512 512 64 128: deepseek_v4
1024 1024 1 0: emu3
"""

_CHECKPOINTS = """
64 64 71 0: Falcon-7B
80 80 1 0: Phi-2
96 96 1 2047: Phi-3-mini
96 64 1 0: MiniCPM3-4B
128 128 12 0: GLM-4.5
128 128 48 0: StarCoder
160 160 4 0: StableLM-2-12B
192 128 1 0: DeepSeek-V3
256 256 8 0: Qwen3-Next
"""


def _read(text: str) -> tuple[ModelShape, ...]:
    shapes: list[ModelShape] = []
    for line in text.split("\n"):
        if line.startswith("  "):
            names = (*shapes[-1].names, *line.split())
            shapes[-1] = shapes[-1]._replace(names=names)
        elif line:
            numbers, _, listed = line.partition(":")
            key_size, value_size, group, window = map(int, numbers.split())
            names = tuple(listed.split())
            shapes.append(ModelShape(key_size, value_size, group, window, names))
    return tuple(shapes)


FAMILIES = _read(_FAMILIES)
"""Shapes of the families of transformers 5.24.0."""
CHECKPOINTS = _read(_CHECKPOINTS)
"""Shapes of checkpoints."""
