"""Generation: requests in, finished samples out."""
