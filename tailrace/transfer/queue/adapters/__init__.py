"""Adapters of the queue for other libraries and for a user's own loops. The queue itself imports none of them.

dataloader   claims of a task, one after the other     dataset      the same for PyTorch's DataLoader
claimant     a dataset's claims, for its workers       group        ranks that work on the same rows
experience   batches for a user's own training loop    tensors      cells as tensors
layouts      columns of arrays: packed, padded, nested
"""
