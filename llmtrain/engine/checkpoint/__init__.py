"""Sharded save and load: pieces of tensors to safetensors shards and back, under any layout."""
