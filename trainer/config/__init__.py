"""What a run is: sections, their defaults and checks, files."""
