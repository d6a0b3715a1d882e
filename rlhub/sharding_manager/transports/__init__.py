"""Ways for the bytes of a plan to travel."""
