"""One file for each model class: its plan, the TP-enabled class, a tiny configuration and inputs for it."""
