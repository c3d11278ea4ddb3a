"""Training, rollouts and rewards as Ray actors; no method imports this package."""
