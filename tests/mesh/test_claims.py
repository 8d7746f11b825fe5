"""Claims: one owner at a time; a claim waits for an owner that is ending."""

import threading

from rowmesh.mesh.claims import Claims


def test_one_owner_at_a_time():
    claims = Claims()
    assert claims.take("rows", 0.0)
    assert claims.take("gradients", 0.0)
    assert not claims.take("rows", 60.0), "at once: it does not end"


def test_who_comes_while_one_ends_waits():
    claims, found = Claims(), []
    claims.take("rows", 0.0)
    claims.end("rows")
    assert not claims.take("rows", 0.01)
    thread = threading.Thread(target=lambda: found.append(claims.take("rows", 60.0)))
    thread.start()
    claims.release("rows")
    thread.join()
    assert found == [True]


def test_what_nobody_has_does_not_end():
    claims = Claims()
    claims.end("rows")
    assert claims.take("rows", 0.0)
