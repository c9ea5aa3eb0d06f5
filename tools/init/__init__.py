"""Write a recipe for the user's images: list a folder, split it, and measure its images."""
