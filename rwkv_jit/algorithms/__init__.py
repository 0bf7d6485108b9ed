"""The algorithms. Each says why it cannot do a problem, what its forward keeps, and its schedules."""
