"""Other engines' HTTP interfaces: sampling options that Quire does not have, and routes.

Values that would change tokens are refused by name, never ignored; those without effect are accepted, since clients of
those engines send their defaults. Hints that change no token (`cache_prompt`, `id_slot`) are not listed here: they are
reported as ignored, like any unknown field.
"""

from __future__ import annotations

from typing import Any

OTHER_DIALECTS: dict[str, tuple[Any, ...]] = {
    # llama.cpp's server
    "dry_allowed_length": (2,),
    "dry_base": (1.75,),
    "dry_multiplier": (0, 0.0),
    "dry_penalty_last_n": (-1, 0, 64),
    "dry_sequence_breakers": (["\n", ":", '"', "*"], []),
    "dynatemp_exponent": (1, 1.0),
    "dynatemp_range": (0, 0.0),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "lora": ([],),
    "min_keep": (0, 1),
    "mirostat": (0,),
    "mirostat_eta": (0.1,),
    "mirostat_tau": (5, 5.0),
    "n_discard": (0,),
    "n_keep": (0,),
    "n_probs": (0,),
    "penalize_nl": (False,),
    "post_sampling_probs": (False,),
    "repeat_last_n": (64,),
    "repeat_penalty": (1, 1.0),
    "samplers": (),
    "tfs_z": (1, 1.0),
    "top_n_sigma": (-1, -1.0),
    "typical_p": (1, 1.0),
    "xtc_probability": (0, 0.0),
    "xtc_threshold": (0.1,),
    # SGLang's
    "custom_logit_processor": (),
    "custom_params": (),
    "lora_path": (),
    "min_new_tokens": (0,),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "stop_regex": ([],),
    # text-generation-webui's, KoboldCpp's and Aphrodite's
    "do_sample": (True,),
    "encoder_repetition_penalty": (1, 1.0),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "guidance_scale": (1, 1.0),
    "negative_prompt": ("",),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0, 0.0),
    "smoothing_factor": (0, 0.0),
    "tfs": (1, 1.0),
    "top_a": (0, 0.0),
    "typical": (1, 1.0),
    "watermark": (False,),
    # of Ollama's own routes
    "options": ({},),
    "template": ("",),
}
"""Names, each with the values that have no effect."""

_CHAT, _COMPLETION, _EMBEDDING = "use /v1/chat/completions", "use /v1/completions", "use /v1/embeddings"
_MODELS, _INFO, _HEALTH = "use /v1/models", "use /server_info", "use /health"
_CLEAR = "a server started with --admin has POST /reset_prefix_cache"
_ADMIN = "start the server with --admin to have it"
_TEXT = "only text models are served"
_NO_LORA = "LoRA adapters are not supported yet"
_NO_SLEEP = "an engine cannot release its memory and resume; stop the server, and start it again"
_NO_UPDATE = "weights do not change while a server runs; save them, and start a server with that checkpoint"
_NO_PAUSE = "generation is not paused; /abort ends a request"
_CLASSIFY = "use /v1/score, or /v1/completions with structured_outputs.choice"
_BATCH = "use 'quire batch IN.jsonl OUT.jsonl --url URL', which answers such files"

OTHER_ROUTES: dict[str, str] = {
    # Quire's, with --admin
    **dict.fromkeys(("/reset_prefix_cache", "/debug/requests", "/debug/steps"), _ADMIN),
    # OpenAI's
    **dict.fromkeys(("/v1/files", "/v1/batches"), _BATCH),
    **dict.fromkeys(("/v1/audio", "/v1/images", "/v1/moderations", "/v1/realtime", "/v1/videos"), _TEXT),
    "/v1/engines": _COMPLETION,
    # vLLM's
    "/classify": _CLASSIFY,
    "/collective_rpc": "an engine runs no other code",
    "/inference/v1/generate": "use /v1/completions, whose prompt may be token ids, with return_token_ids",
    "/invocations": _CHAT,
    **dict.fromkeys(("/is_paused", "/pause", "/resume"), _NO_PAUSE),
    **dict.fromkeys(("/is_scaling_elastic_ep", "/scale_elastic_ep"), "start more servers, behind 'quire route'"),
    "/is_sleeping": _NO_SLEEP,
    **dict.fromkeys(
        (
            *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
            "/get_world_size",
        ),
        _NO_UPDATE,
    ),
    "/ping": _HEALTH,
    "/pooling": _EMBEDDING,
    "/sleep": _NO_SLEEP,
    "/start_profile": "start the server with --profile DIR",
    "/stop_profile": "start the server with --profile DIR",
    "/v1/load_lora_adapter": _NO_LORA,
    "/v1/unload_lora_adapter": _NO_LORA,
    "/wake_up": _NO_SLEEP,
    # SGLang's
    "/abort_request": "use /abort",
    **dict.fromkeys(("/pause_generation", "/continue_generation"), _NO_PAUSE),
    **dict.fromkeys(("/release_memory_occupation", "/resume_memory_occupation"), _NO_SLEEP),
    **dict.fromkeys(
        (
            *(
                "/init_weights_update_group",
                "/destroy_weights_update_group",
                "/init_weights_send_group_for_remote_instance",
            ),
            *("/update_weights_from_disk", "/update_weights_from_distributed", "/update_weights_from_tensor"),
            *("/update_weights_from_ipc", "/send_weights_to_remote_instance", "/update_weight_version"),
            *("/get_weights_by_name", "/weights_checker"),
        ),
        _NO_UPDATE,
    ),
    "/encode": _EMBEDDING,
    "/flush_cache": _CLEAR,
    "/generate": _COMPLETION,
    "/get_load": "use /load",
    **dict.fromkeys(("/load_lora_adapter", "/unload_lora_adapter"), _NO_LORA),
    **dict.fromkeys(("/open_session", "/close_session"), "prefixes are cached without sessions; leave them out"),
    "/parse_function_call": "use /v1/chat/completions with tools, which answers with parsed calls",
    "/separate_reasoning": "use /v1/chat/completions, which answers with separate reasoning",
    "/v1/classify": _CLASSIFY,
    "/get_model_info": _MODELS,
    "/get_server_info": _INFO,
    "/health_generate": _HEALTH,
    "/model_info": _MODELS,
    # llama.cpp's
    "/apply-template": "use /tokenize with messages and return_token_strs",
    "/completion": _COMPLETION,
    "/embedding": _EMBEDDING,
    "/infill": "filling in is not supported",
    "/props": _INFO,
    "/slots": "use /view, or with --admin /debug/requests",
    # Ollama's
    "/api/chat": _CHAT,
    "/api/embed": _EMBEDDING,
    "/api/embeddings": _EMBEDDING,
    "/api/generate": _COMPLETION,
    "/api/ps": _MODELS,
    "/api/show": _MODELS,
    "/api/tags": _MODELS,
    "/api/version": "use /version",
}
"""Paths, with those below them, and what to do instead."""


def instead_of(path: str) -> str | None:
    """What to use instead of another engine's route; None if this is none."""
    parts = path.split("/")
    above = ("/".join(parts[:count]) for count in range(len(parts), 1, -1))
    return next((OTHER_ROUTES[one] for one in above if one in OTHER_ROUTES), None)
