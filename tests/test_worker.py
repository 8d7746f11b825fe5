import signal
import threading

import pytest

from rowmesh.worker import Worker


def test_the_end_of_a_thread_is_known_where_waiting_for_it_was_interrupted():
    goes_on, done = threading.Event(), []

    def work():
        goes_on.wait(60.0)
        done.append(1)

    worker = Worker(target=work, name="working")
    worker.start()
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        worker.join()
    timer.join()
    assert not worker.has_ended
    worker.join(0.01)
    assert not worker.has_ended
    goes_on.set()
    worker.join()
    assert worker.has_ended
    assert done == [1]


def fail():
    raise SystemExit


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_fails_has_ended():
    worker = Worker(target=fail, name="failing")
    with pytest.raises(RuntimeError, match="failing was not started"):
        worker.join()
    worker.start()
    worker.join()
    assert worker.has_ended
