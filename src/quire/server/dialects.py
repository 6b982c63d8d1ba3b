"""Sampling options of other engines' HTTP interfaces that Quire does not have.

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
