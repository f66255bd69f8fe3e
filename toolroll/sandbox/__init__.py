"""Running the model's code: the wire types, the client, the server."""
