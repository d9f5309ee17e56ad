"""Faults of moto in actions that it has, one module a service: what could go upstream, to https://github.com/getmoto/moto.

Each module says what moto does instead, and names the issue or pull request where one is known. moto 5.2.5 is the newest
release (2026-11); once a release has a fault mended, its module goes.
"""
