"""Any flow-matching pipeline of diffusers as a model family, learned from the pipeline's own call."""
