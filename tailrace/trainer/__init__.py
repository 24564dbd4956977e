"""The actor update: packing, forward pass, loss, optimizer, checkpoints."""
