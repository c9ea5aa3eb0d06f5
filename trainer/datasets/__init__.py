"""Making, checking, packing and staging data sets."""
