"""Runs rdma-core's pyverbs tests and reports the result of each.

Arguments: the folder of the tests; a file with parts of names, one per line (a test is
listed if its id contains one; empty: all); a file with the ids of listed tests to run
(empty: all); a file with ids not to run; a file for the results; then the arguments of
run_tests.py.

The results are JSON, one object per line, written immediately: the listed ids first,
then a start and an end for each test that is run, so that a crash or a hang can be
attributed to its test.
"""
import base64
import faulthandler
import importlib.util
import json
import multiprocessing
import os
import struct
import sys
import time
import types
import unittest


# 1024 times "c", encrypted by AES-XTS in two units of 512 bytes with the tweaks 0 and 1.
# The keys are the bytes 1 to 32.
ENCRYPTED = """
JsBLm7Oaw2lipiIVCV+UrcPE0qYub52CcStKUSFfzMHt6t4IT8ppMJkoSEtZQghj4VW1iCPDpoc6
EUUV5ObQ37/RU5+8pm2AhRllTuO9g4goqKkbRpdrQ3X0X8NxBHD2y+/WMREQXJuRu7vlWDJ4qZE/
l9YB9KZGKmvgcB5wH9bGLIIofA8cXdnMW4ENCniBrKflcCfZ/ksIUD/6rTzg/gTI5iWPwgpcFn1P
gPaJPmjMpUEWSPAVeynGjR6EmLV1VFqzu0L0XHaTtSkpBc0LCgSgDja0nRQWoZRJ1hglGkNAcaDP
oQ2hSfvEw8QD90czx6t3gR9QjJXkvEpesOkjuo6TEhOsQ+2f+4FtOhYDXAfHqQkaLogsDepZiIGh
el6Te+SEHJk9SHTBSAotMXqr4rjES0LPUdT5AU/tTx2HSBbjTq1QuvvZhX6H8vRADgtd8WcTR0Oz
LZMNyDYIeZDc3wyxdeq6QRVogpvwYwMjk2mdjpVuv5/KTITsTvNBbt3kP3DYVXinPmHigYlpkIQg
CybP1C9CXLnPfj5R7gNLY47Ww0BiFyeaZNajpLeW8f91utYeZphNulgT+Zq0GvY63gmVwT5FGvjF
z1ANxAU9Fez4e92XqDPxfH5Z3SnMhayUO7kL+7/zp8Ph4ufpKtqzqSXbWtnpE9fvkbltkO7enzEU
YUNQPKoT7V5vrkmlG1gx+fmWORIvoH9Kl70X7YukN2WJ0EboNWVlfwzHspJ8er5MU/AJ5hACINvk
544bVXPXg3DP50PDRqwc6eaQpsPMAfqtJH3aClU32lv10B9VuAnPTwX4IJwyPcX8saPFmWW1ECBT
zZ0EkJLLj/h0jeQLlZ7xZw9CSiRGpgVikxX3TXzEuBojkCZjgnb+tt3CvWI4osciiuHYIy3VPTDZ
3yTO9ePQIEIL0s1U5eX6YTGzpXLxIk62aKd8MxCmWqj6XMNLZ1JxUKbRTxcZr8j4Vy6xThecacpF
sq+HgHpi3Ww363nbJf/nsu7FAhw9nK93jXCXiYC4Fs5GBf3Au9Bs++2rXNTMYxln2fFu2DMyRqAB
Cj6pSEi6KRihgDYWEQ7GMnAm4TvX95Q2Md+ufxc6Ecmbto+uMKvCPQBefjjq6yhj01JKky3VYcGB
c4namQAds1dz5E2/3BJcVWZtfm7e5leWLy115exqYniMoZngnWcpUHlIik1gNzS/Qf8n6pYW+4v7
KTUVTcrQjv9Yv0aco0T5YOY7CmdJmLgOoGRF6YvCap0elZAMmDqp8+hp/RUJ+iJrJiUudfrzTLW7
8hAcOu8QCDXFMyVUwi96NTKmreSOhC1wBsKHTpRUWUItDhqmq8gzpnrWyQLrYJxRxh+ZWD8G8Q==
"""


# The credential of softhca's profile roce-wrapped, and keys of the bytes from 1 on, wrapped
# by its import key.
CREDENTIAL = """
ef70d3b2dea46ecc35f5b8d67a6f815cc91a763ec82d321983b996102ff44a089c3cee8004657b62
9f201a75a1a2ed68
"""
WRAPPED_KEY = '023a241e6345ba7d06b25b3149f62d00a5e3d5c12e371765da8e5d01e47e2da0f9c185d26a6b45c9'
WRAPPED_LONG_KEY = """
c429919f5059e3db93047bac712477894a1433dd39beaf592c35b08795709b3c1e834952888d1f61
4fc7f8df54308fa0658c9ba38f3f9ff05b5250ce1dd941ef706ae0d7f685b63c
"""


def numbers(digits):
    return [number for number, in struct.iter_unpack('!Q', bytes.fromhex(digits))]


def describe_encryption(path):
    """Writes the parameters of the encryption tests."""
    data = base64.b64decode(ENCRYPTED)
    details = {
        'credential': numbers(CREDENTIAL),
        'wrapped_key': numbers(WRAPPED_KEY),
        'wrapped_256_bits_key': numbers(WRAPPED_LONG_KEY),
        'plaintext_key': struct.unpack('8I', bytes(range(1, 33))),
        'encrypted_data_for_512_c': struct.unpack('!64Q', data[:512]),
        'encrypted_data_for_1024_c': struct.unpack('!128Q', data),
    }
    with open(path, 'w') as out:
        json.dump([details], out)
    os.environ['MLX5_CRYPTO_TEST_INFO'] = path


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


def let_sends_complete():
    """Lets each of test_resize_cq's six sends complete before the next step.

    The test makes the CQ too small for six completions, and accepts an error. If the
    device has not completed two of the sends by then, the resize succeeds, the later
    completions overrun the CQ, and the test waits for them forever, with any provider.
    """
    test_cq = sys.modules.get('tests.test_cq')
    if test_cq is None:
        return
    send = test_cq.u.send

    def send_and_wait(*args, **kwargs):
        send(*args, **kwargs)
        time.sleep(0.2)

    test_cq.u = types.SimpleNamespace(**{**vars(test_cq.u), 'send': send_and_wait})


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

    def write(self, **event):
        self.out.write(json.dumps(event) + '\n')
        self.out.flush()

    def startTest(self, test):
        super().startTest(test)
        self.worst[test.id()] = ('pass', '')
        self.write(event='start', id=test.id())

    def stopTest(self, test):
        super().stopTest(test)
        outcome, detail = self.worst[test.id()]
        self.write(event='end', id=test.id(), outcome=outcome, detail=detail)

    def note(self, test, outcome, detail):
        # A failed clean-up or subtest is reported after the test itself.
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
    describe_encryption(results + '.encryption')
    # The tests pass objects that cannot be pickled to processes, which therefore must be
    # forks; since Python 3.14 these are not the default.
    multiprocessing.set_start_method('fork')
    with open(parts) as lines:
        parts = lines.read().splitlines()
    suite = load(folder)
    let_sends_complete()
    tests = [t for t in flatten(suite)
             if not parts or any(part in t.id() for part in parts)]
    with open(wanted) as names:
        only = set(names.read().split())
    with open(known) as names:
        known = set(names.read().split())
    with open(results, 'w') as out:
        result = Result(out)
        result.write(event='list', ids=[test.id() for test in tests])
        chosen = [t for t in tests
                  if (not only or t.id() in only) and t.id() not in known]
        unittest.TestSuite(chosen).run(result)
        result.write(event='done')


if __name__ == '__main__':
    main()
