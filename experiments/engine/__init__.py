"""Points, each a complete experiment and where it runs: made, started, resumed and judged."""
