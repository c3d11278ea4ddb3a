"""What the methods that learn from rewards share."""
