import subprocess
import sys


def test_the_suites_run_without_any_test_framework():
    program = (
        "import sys\n"
        "sys.modules.update(pytest=None, hypothesis=None, beartype=None)\n"
        "from ace_learn.testing import check_contract\n"
        'check_contract(\'{"kind": "boxed"}\')\n'
    )
    subprocess.run([sys.executable, "-c", program], check=True)
