"""docs/models.md: what every model class with a plan saves and costs, and how near it is to one process."""
