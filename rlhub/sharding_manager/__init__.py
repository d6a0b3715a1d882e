"""From the trainer's layout of the weights to the rollout engine's, checked at every sync."""
