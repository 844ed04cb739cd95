"""Pictures of runs and episodes."""
