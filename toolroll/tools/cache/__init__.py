"""Cache of the results of pure tools, which all processes of a cluster share."""
