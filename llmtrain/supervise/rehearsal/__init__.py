"""Failures on purpose, with the real scripts, agents, supervisor and engine, and what they cost."""
