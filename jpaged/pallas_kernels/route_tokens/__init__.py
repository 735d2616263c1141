"""From a router's logits to the experts of each token, their weights, and rows sorted by expert."""
