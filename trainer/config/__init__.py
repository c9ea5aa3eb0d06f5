"""The config of a run: sections, their defaults and checks, files."""
