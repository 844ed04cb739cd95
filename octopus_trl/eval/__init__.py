"""Benchmarks, their worlds and graders."""
