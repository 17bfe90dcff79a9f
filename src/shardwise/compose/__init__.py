"""What goes together with a sharded model: each part cuts by the layouts of the same table."""
