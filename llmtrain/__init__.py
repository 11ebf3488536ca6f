"""llmtrain: plan, launch, train, watch and resume large language model training runs."""

__version__ = "0.1.0"
