"""From an attempt's end to what happens next."""
