"""What bench.py measures that needs a file of its own."""
