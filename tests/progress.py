"""What is being tested, as it goes on; at the end what was left out, and how to get it."""

import ast
import collections
import os
import time


class Progress:
    """A line when a file of tests begins, and one when it has ended, in place of pytest's dots."""

    def __init__(self, config):
        self.plugins, self.all = config.pluginmanager, config.getoption("--all")
        self.root = config.rootpath
        self.expected, self.left_out = collections.Counter(), 0
        self.began, self.ended, self.outcomes = {}, collections.Counter(), {}

    def pytest_collection_finish(self, session):
        if session.items:  # here, and not in processes of pytest-xdist
            self._expect([item.nodeid for item in session.items])

    def pytest_xdist_node_collection_finished(self, node, ids):
        self._expect(ids)

    def pytest_testnodedown(self, node, error):
        self.left_out = max(self.left_out, getattr(node, "workeroutput", {}).get("left_out", 0))

    def pytest_deselected(self, items):
        if not self.all:  # else it was by the user's own -k or -m
            self.left_out += sum(item.get_closest_marker("full") is not None for item in items)

    def _expect(self, ids):
        self.expected = collections.Counter(name.split("::")[0] for name in ids)

    def pytest_runtest_logstart(self, nodeid, location):
        file = nodeid.split("::")[0]
        if file not in self.began:
            self.began[file], self.outcomes[file] = time.monotonic(), collections.Counter()
            text = ast.get_docstring(ast.parse((self.root / file).read_text())) or ""
            title = text.partition("\n")[0].split(". ")[0]
            self._say(f"{os.path.basename(file)}: {title}")

    def pytest_runtest_logreport(self, report):
        file = report.nodeid.split("::")[0]
        outcomes = self.outcomes[file]
        if report.failed:
            self._say(f"FAILED {report.nodeid}", red=True)
        if report.when == "call" or report.outcome != "passed":
            outcomes[report.outcome] += 1

    def pytest_runtest_logfinish(self, nodeid, location):
        file = nodeid.split("::")[0]
        self.ended[file] += 1
        if self.ended[file] == self.expected[file]:
            took = time.monotonic() - self.began[file]
            counts = ", ".join(f"{n} {outcome}" for outcome, n in self.outcomes[file].items())
            done, total = self.ended.total(), self.expected.total()
            name = os.path.basename(file)
            self._say(f"[{done:3d} of {total}] {name}: {counts} in {took:.0f} s")

    def pytest_report_teststatus(self, report, config):
        if config.option.verbose <= 0 and report.outcome in ("passed", "skipped", "failed"):
            counted = report.when == "call" or report.outcome != "passed"
            return (report.outcome if counted else ""), "", "FAILED" if report.failed else ""

    def _say(self, line, **markup):
        terminal = self.plugins.get_plugin("terminalreporter")
        terminal.ensure_newline()
        terminal.write_line(line, **markup)

    def pytest_terminal_summary(self, terminalreporter):
        skipped = terminalreporter.stats.get("skipped", [])
        reasons = collections.Counter(report.longrepr[2] for report in skipped)
        if reasons or self.left_out:
            terminalreporter.section("not tested")
        for reason, count in reasons.items():
            self._say(f"{count} skipped: {reason.removeprefix('Skipped: ')}")
        if self.left_out:
            self._say(f"{self.left_out} left out: ./start.sh test --all runs them too")
