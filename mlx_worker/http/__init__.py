"""What the HTTP servers here share: replies, errors, headers, the access log, connections."""
