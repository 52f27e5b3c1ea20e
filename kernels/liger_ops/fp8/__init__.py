"""Linear layers whose matrix products run in float8: payloads, their scales, and the products of both."""
