"""The actor update: packing, forward, loss, optimizer, checkpoints."""
