"""Use of a trained model: evaluate, predict, fold, export."""
