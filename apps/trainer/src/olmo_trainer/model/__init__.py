"""The model: attention, feed-forward, routed layer, block, transformer, initial values."""
