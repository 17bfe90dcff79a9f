"""`shardwise doctor`: what the machines of a job are like, and what would keep ranks on them from working together."""
