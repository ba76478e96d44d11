"""``hashtap bench server``: what capture costs a server, measured in rounds against the same server without it.

Needs ``pip install 'hashtap[bench]'``. SGLang is only ever started as a child process.
"""
