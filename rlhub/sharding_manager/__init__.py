"""From the trainer's layout of the weights to the rollout engine's, by a plan made once, checked at every sync."""
