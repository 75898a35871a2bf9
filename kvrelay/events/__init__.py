"""Tells who holds what: workers publish the changes of their prefix caches, routers subscribe."""
