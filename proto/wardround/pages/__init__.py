"""The HTML reports of all three programs: blocks of content, one template, one stylesheet, one chart.

May import wardround.terminal and Jinja2. Refuses to know a program's records: each program fills in the blocks.
"""
