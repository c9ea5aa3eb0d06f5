"""What one does with a trained model: evaluate, predict, fold, export."""
