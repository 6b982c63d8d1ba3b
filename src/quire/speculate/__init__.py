"""What drafts tokens for a model to verify: n-grams of the text, a smaller model, heads on the model's own features."""
