"""One file per architecture: its plan, its classes, and tiny configurations to prove the plan on."""
