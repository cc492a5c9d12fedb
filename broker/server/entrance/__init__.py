"""What stands before every endpoint: connections, hosts, origins, keys, sizes, the end in order."""
