"""The decoder-only transformers: plain tensors, hand-written tensor-parallel layers, one stage at a time."""
