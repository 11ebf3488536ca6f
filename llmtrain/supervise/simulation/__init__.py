"""A run over weeks, simulated event by event with the detectors and the policy that real runs have."""
