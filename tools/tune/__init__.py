"""Tune a config: the range of its learning rate, its precision and its communication."""
