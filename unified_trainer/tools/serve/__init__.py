"""Servers and their clients share these: the queue, the web server, videos as JSON, requests over HTTP."""
