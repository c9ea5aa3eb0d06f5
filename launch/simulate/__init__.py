"""What a cluster that nobody has started would do: a step's events, and the answers that follow from them."""
