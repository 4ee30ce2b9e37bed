"""HTTP: the addresses, the bodies of requests, and the connections."""
