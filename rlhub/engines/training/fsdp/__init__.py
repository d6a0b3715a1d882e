"""Training with FSDP2: parameters, gradients and optimizer state sharded over ranks; packed, padding-free forward passes."""
