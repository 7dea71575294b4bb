"""Model folders: config.json, safetensors, and the decoder in torch."""
