"""Parts shared by the methods that learn from rewards."""
