"""The Wan family: model, causal form, codec and adapters."""
