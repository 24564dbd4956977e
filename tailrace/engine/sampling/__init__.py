"""Sampling: the sampler, the draws that all ranks of a replica agree on, and the C++ draws for CPUs."""
