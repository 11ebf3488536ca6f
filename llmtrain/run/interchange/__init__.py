"""Models to and from Hugging Face folders: safetensors and JSON only, no pickle."""
