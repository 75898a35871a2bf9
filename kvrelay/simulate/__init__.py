"""A cluster in virtual time: the real router and the real engines, over runners and transfers that only cost time.

loop      the clock and the events of a run
costs     what a pass and a transfer take
host      cores that workers share
runner    computes nothing, and says how long that took
relay     moves nothing, and says how long that took
worker    an engine with these two, and its way to the router
cluster   a router and its workers; failures, restarts, changes of role
traffic   who asks what, and when
clients   ask, and note what they get
run       one simulation from options to result
"""
