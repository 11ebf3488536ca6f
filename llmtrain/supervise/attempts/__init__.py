"""One attempt, from its agents' start to its tear-down."""
