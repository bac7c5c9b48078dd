"""Replicas that exchange parameters instead of gradients: local steps, outer optimizers, gossip, compression."""
