"""A model's shards, the names and shapes of its weights, and rotary frequencies."""
