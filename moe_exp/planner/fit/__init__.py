"""The constants of the planner, fitted to measured runs. No torch."""
