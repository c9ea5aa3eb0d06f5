"""From own images to a recipe: what a folder holds, which images train, and what a run needs to know of them."""
