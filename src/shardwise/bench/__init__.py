"""Measurements of loading and of steps, beside diffusers' own tensor parallelism on the same machine."""
