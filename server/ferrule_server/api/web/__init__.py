"""The HTTP side: metrics for Prometheus and a page that shows the server, on threads of its own.

assembly.py       puts it together by the settings
site.py           what it answers: a fixed table of paths
listener.py       a small HTTP/1.1 server, bounded in every direction
request_head.py   reads the head of one request
events.py         one message per second to all who watch the page
message.py        what that message says
shared_render.py  one rendering for all who ask at the same time
page/             the files of the page
"""
