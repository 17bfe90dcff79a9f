"""`shardwise generate`: from a model, a prompt and a number of ranks to pictures."""
