"""Fast long-context decoding of Hugging Face checkpoints in JAX."""
