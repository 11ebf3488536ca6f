"""Bad numbers: what is measured, what is decided, what is done. Decisions are pure and free of torch."""
