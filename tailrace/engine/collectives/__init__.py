"""Exchanges of tensors between the TP ranks of a replica, one implementation per file."""
