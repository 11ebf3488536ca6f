"""Which layouts are legal, which this engine runs, and which one is the best."""
