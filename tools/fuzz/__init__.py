"""Checkpoint files made to be wrong, by the hundred thousand: what is refused, and what safetensors says of them."""
