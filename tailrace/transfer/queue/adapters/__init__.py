"""What other libraries and loops of one's own use; the queue itself imports none of it.

dataloader   claims of a task, one after the other     dataset      the same for PyTorch's DataLoader
claimant     a dataset's claims, for its workers       group        ranks that work on the same rows
experience   batches for a training loop of one's own  tensors      cells as tensors
layouts      padded or nested
"""
