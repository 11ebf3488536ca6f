"""The nodes of a run: who there is, and the way to each."""
