"""GGUF files: a model of llama.cpp's as a checkpoint's folder."""
