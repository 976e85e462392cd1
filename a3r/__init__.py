"""The vocabulary of A3R and its record. Import nouns from their modules, the client SDK from `a3r.swarm`."""
