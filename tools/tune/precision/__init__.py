"""Recommend a precision and a loss scale from the gradients of a few training steps."""
