"""The runtime is the head of a cache. It owns the requests, the lines in which they wait, the clock and every task. It
hands the effects of a plan to a worker, and returns each outcome to the core.
"""
