"""The HTTP side: metrics for Prometheus and a page that shows the server, on a thread with its own event loop.

assembly.py  builds the listener from the settings; concurrent scrapes share one rendering
listener.py  a small HTTP/1.1 server with bounds on connections, sizes and times
site.py      the fixed table of paths and their answers
events.py    one message per second, shared by all viewers of the page
page/        the files of the page
"""
