"""Bytes: of a rank by kind and of a node's host memory."""
