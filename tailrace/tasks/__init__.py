"""The small worker loops between rollout and actor: claim, compute, ack."""
