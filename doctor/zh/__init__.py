"""Tables alone: the doctor's Chinese by the English templates. words.py looks them up.

A test holds each template against these tables: none is left out, and the fields are the same.
"""

from . import attach, judges, report
from .headings import HEADINGS

SENTENCES = report.SENTENCES | judges.SENTENCES | attach.SENTENCES
# Plain names that stand in sentences, such as that of a call.
NAMES = {
    "the forward pass of DDP": "DDP 的前向",
    "the constructor of DDP": "DDP 的构造函数",
    "the constructor of DeviceMesh": "DeviceMesh 的构造函数",
    "the debugger": "调试器",
    "a loader": "DataLoader",
    "the end of a loader": "关闭 DataLoader 的 worker",
    "reading data": "读数据",
    "a command that it has started": "等待外部命令",
    "the network": "网络通信",
    "a result of the GPU": "读取 GPU 结果",
    "py-spy took longer than 60 s": "py-spy 超过 60 秒没有返回",
    "py-spy said nothing": "py-spy 什么都没有输出",
}
# (pattern, what stands there in Chinese): of conditions and calls that are made up of parts.
PATTERNS = [
    (r"^Horovod's ", "Horovod 的 "),
    (r"^else of (if .*) \(line (\d+)\)$", r"\1 的 else（第 \2 行）"),
    (r"^(if .*) \(line (\d+)\)$", r"\1（第 \2 行）"),
]

__all__ = ["HEADINGS", "NAMES", "PATTERNS", "SENTENCES"]
