"""What the strategies are made of."""
