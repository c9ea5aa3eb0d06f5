"""`bigbatch ablate`: a recipe trick by trick, each on top of those before it."""
