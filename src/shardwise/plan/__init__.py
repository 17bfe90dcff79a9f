"""The static half: plans, layouts and checks. Needs no process group and no weights."""
