"""One rank's share of the model over its KV cache: one file per implementation."""
