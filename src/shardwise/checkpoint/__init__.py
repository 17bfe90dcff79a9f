"""Checkpoints: finding the files, trusting their headers, reading exactly this rank's bytes."""
