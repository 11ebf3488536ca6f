"""Seconds: of kernels, collectives, layers and schedules, up to one optimizer step."""
