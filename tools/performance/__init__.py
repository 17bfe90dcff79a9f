"""docs/performance.md: what was measured of loading and of steps, and on what."""
