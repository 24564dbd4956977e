"""Model references: a directory, a hub id or a GGUF becomes a Hugging Face directory."""
