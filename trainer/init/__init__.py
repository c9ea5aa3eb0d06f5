"""From own pictures to a recipe: what a folder holds, which pictures train, and what a run needs to know of them."""
