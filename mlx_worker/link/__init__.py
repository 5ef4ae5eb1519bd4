"""The worker's way out: a connection to its gateway that is kept, whatever the network does."""
