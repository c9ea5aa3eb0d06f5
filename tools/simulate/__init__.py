"""Predict a run on a cluster without starting it: the events of a step, and the figures that follow from them."""
