"""`bench serve`: what exits are worth on a real server, against full thinking and a budget at the oracle exit."""
