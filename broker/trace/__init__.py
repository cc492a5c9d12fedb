"""What happened to every request and every entry: events, and the recorder that keeps them."""
