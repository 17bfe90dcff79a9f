"""docs/combine.md: what goes together with a sharded model, measured."""
