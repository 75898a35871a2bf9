"""A cluster in virtual time: the real router and the real engines, over runners and transfers that only cost time.

loop      the clock and the events of a run
costs     what a pass and a transfer take
host      shared by workers, whose passes slow each other
runner    computes nothing, and says how long that took
relay     moves nothing, and says how long that took
embedding the same of images: tower, features, relay
engines   real ones over these
worker    an engine, and its way to the router
cluster   a router and its workers; failures, restarts, changes of role
traffic   who asks what, and when
clients   ask, and note what they get
run       one simulation from options to result
"""
