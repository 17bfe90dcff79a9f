"""The runtime half: process groups, local modules, and turning a model into a rank's part of it."""
