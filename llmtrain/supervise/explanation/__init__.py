"""From what is wrong to why, in words and one file."""
