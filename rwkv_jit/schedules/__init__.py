"""What ops are and which launches they take, by sizes and names: without torch and without CUDA."""
