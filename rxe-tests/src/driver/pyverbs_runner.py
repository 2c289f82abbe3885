"""Runs rdma-core's pyverbs tests and says of each how it ended.

Arguments: the folder of the tests, a file with parts of names, one on a line (a
test belongs to the list if its id contains one; empty: all), a file with the ids
of the list to run (empty: all), a file with those not to run, a file for the
results, and then what run_tests.py would be given.

The results are JSON, one object on a line, written as they come: the ids of
the list first, then a start and an end for each one that is run, so that
whoever reads knows which test a crash or a hang belongs to.
"""
import faulthandler
import importlib.util
import json
import multiprocessing
import os
import sys
import unittest


def load(folder):
    """Loads the package as run_tests.py does, under the name `tests`."""
    sys.path.insert(0, folder)
    from args_parser import parser
    spec = importlib.util.spec_from_file_location(
        'tests', os.path.join(folder, '__init__.py'))
    tests = importlib.util.module_from_spec(spec)
    sys.modules['tests'] = tests
    spec.loader.exec_module(tests)
    parser.parse_args()
    return unittest.defaultTestLoader.loadTestsFromModule(tests)


def flatten(suite):
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from flatten(item)
        else:
            yield item


class Result(unittest.TestResult):
    def __init__(self, out):
        super().__init__()
        self.out = out
        self.worst = {}

    def say(self, **what):
        self.out.write(json.dumps(what) + '\n')
        self.out.flush()

    def startTest(self, test):
        super().startTest(test)
        self.worst[test.id()] = ('pass', '')
        self.say(event='start', id=test.id())

    def stopTest(self, test):
        super().stopTest(test)
        outcome, detail = self.worst[test.id()]
        self.say(event='end', id=test.id(), outcome=outcome, detail=detail)

    def note(self, test, outcome, detail):
        # A failed clean-up or subtest comes after the test itself.
        key = test.id()
        if self.worst.get(key, ('pass',))[0] != 'fail':
            self.worst[key] = (outcome, detail)

    def addError(self, test, err):
        super().addError(test, err)
        self.note(test, 'fail', self._exc_info_to_string(err, test)[-600:])

    addFailure = addError

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.note(test, 'skip', str(reason))

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.note(test, 'fail', 'unexpected success')


def main():
    folder, parts, wanted, known, results = sys.argv[1:6]
    sys.argv = [os.path.join(folder, 'run_tests.py')] + sys.argv[6:]
    faulthandler.enable()
    # The tests give processes what cannot be sent to one that is not a fork;
    # from Python 3.14 on forks are no longer what they get unasked.
    multiprocessing.set_start_method('fork')
    with open(parts) as lines:
        parts = lines.read().splitlines()
    tests = [t for t in flatten(load(folder))
             if not parts or any(part in t.id() for part in parts)]
    with open(wanted) as names:
        only = set(names.read().split())
    with open(known) as names:
        known = set(names.read().split())
    with open(results, 'w') as out:
        result = Result(out)
        result.say(event='list', ids=[test.id() for test in tests])
        chosen = [t for t in tests
                  if (not only or t.id() in only) and t.id() not in known]
        unittest.TestSuite(chosen).run(result)
        result.say(event='done')


if __name__ == '__main__':
    main()
