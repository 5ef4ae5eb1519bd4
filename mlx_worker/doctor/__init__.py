"""`mlx-worker doctor`: what is right and wrong here, line by line, each with the next step."""
