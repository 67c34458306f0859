"""What the pages and the metrics of both programs share: log-ins, sessions, the guard of each request, live changes.

May import wardround.pages, wardround.local and wardround.errors; Starlette and uvicorn, the extra `dashboard`, where a
page is served, and prometheus-client, the extra `metrics`, where metrics are asked for. Refuses to know a program's
records: each program gives its pages as blocks.
"""
