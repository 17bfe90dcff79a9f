"""Plans broken on purpose: what each fault does to the numbers, and whether the static check finds it."""
