"""MLPerf's rules and reference convergence."""
