"""How a model is cut into shards, and how weights come into it: names and shapes, and rotary frequencies."""
