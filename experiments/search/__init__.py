"""`bigbatch tune search`: from coarse to fine, in rounds of short runs."""
