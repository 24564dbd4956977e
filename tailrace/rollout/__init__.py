"""Rollout: claims prompts, generates, acks each sample as it finishes."""
