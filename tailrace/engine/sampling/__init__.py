"""From logits to tokens: the sampler, the draws that all ranks of a replica agree on, and the C++ one for CPUs."""
