"""Decoders: one rank's share of the model over its KV cache, one implementation per file."""
