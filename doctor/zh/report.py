"""The sentences of the report around what was found: how it ended, what was seen, the files."""

SENTENCES = {
    # ---- report.py
    "{line}  rank {rank} failed: {error}": "{line}  rank {rank} 出错：{error}",
    "{line}  a process that joined no group failed: {error}": (
        "{line}  一个没有加入任何进程组的进程出错：{error}"
    ),
    "{line}  a process that joined no group {how}": "{line}  一个没有加入任何进程组的进程{how}",
    "it had stood still for {seconds} s at {lines}": "{seconds} 秒没有动静，停在 {lines}",
    "the script has ended, and something keeps its process: a thread?": (
        "脚本已经结束，但它的进程还没有退出：是不是还有线程在运行？"
    ),
    "each process joins a group of its own: there is nothing to compare": (
        "每个进程各自加入了一个只有自己的进程组：没有可比较的内容"
    ),
    "of the {size} processes of a group {count} were looked at: the others run where "
    "the doctor does not see them": (
        "进程组有 {size} 个进程，只检查了其中 {count} 个：其余的在医生看不到的地方运行"
    ),
    "the group has one process: there is nothing to compare. Start two, as by "
    "--nproc-per-node=2; with one GPU put CUDA_VISIBLE_DEVICES= before the command": (
        "进程组只有一个进程：没有可比较的内容。请启动两个，例如 --nproc-per-node=2；"
        "只有一块 GPU 时，在命令前面加上 CUDA_VISIBLE_DEVICES="
    ),
    "{line}  rank {rank} {how}": "{line}  rank {rank} {how}",
    "ended without an exception, after this line": "在这一行之后结束，没有抛出异常",
    "was ended by {name} after this line": "在这一行之后被 {name} 结束",
    "{text}: by the kernel, if memory was short": "{text}：可能是内存不足，由内核杀掉的",
    "{text}: gloo does so where sizes differ between the processes": (
        "{text}：各进程的张量大小不一致时，gloo 会这样结束进程"
    ),
    "{text}: a fault in compiled code": "{text}：编译过的代码（C/C++）里出了错",
    "no process of the script began to run: there is nothing to compare": (
        "脚本的进程一个也没有运行起来：没有可比较的内容"
    ),
    "the script joins no process group of torch: there is nothing to compare": (
        "脚本没有加入 torch 的进程组：没有可比较的内容"
    ),
    "{line}  here it asks for a GPU, and is told that there is none": (
        "{line}  脚本在这里问有没有 GPU，得到的回答是没有"
    ),
    "{line}  here it asks for a GPU, and is told that there is one: the CPU takes its place": (
        "{line}  脚本在这里问有没有 GPU，得到的回答是有：由 CPU 代替"
    ),
    "{line}  here it names a GPU: the CPU takes its place": (
        "{line}  脚本在这里指定了 GPU：由 CPU 代替"
    ),
    "{line}  this loader gives no batch: has it fewer items than a batch?": (
        "{line}  这个 DataLoader 一个 batch 都没有：数据不够一个 batch 吗？"
    ),
    "no step of an optimizer was seen": "没有看到优化器的 step",
    "no step of an optimizer was seen: does the checkpoint of {line} leave nothing to train?": (
        "没有看到优化器的 step：是不是 {line} 加载的检查点已经训练完了？"
    ),
    "the weights were not compared: each process has a part of them": (
        "没有比较权重：每个进程只有其中一部分"
    ),
    "{line}  here the processes may differ on purpose, for {why}: what they read, count and "
    "validate, and weights without DDP, were not compared": (
        "{line}  这里各进程可能有意不同，因为{why}：没有比较它们读取、统计和验证的内容，也没有比较 DDP 之外的权重"
    ),
    "they compute a model together": "它们一起计算同一个模型",
    "some use a group of their own": "有的进程用了自己的进程组",
    "recorded by torch: {line}": "torch 的记录：{line}",
    "torch's flight recorder could not be read: {error}": "读不了 torch 的 flight recorder：{error}",
    "the doctor failed, and may have missed something: {fault}": (
        "医生自己出了错，可能漏掉了什么：{fault}"
    ),
    "the doctor ended the run: {why}": "医生结束了运行：{why}",
    "it ended with exit code {code}: what it did not come to was not looked at": (
        "脚本以退出码 {code} 结束：没有走到的地方没有检查"
    ),
    "mistakes: {mistakes}, hints: {hints}": "错误：{mistakes}，提示：{hints}",
    "{line}  {text}  → {page}": "{line}  {text}  → {page}",
    "hint: {text}": "提示：{text}",
    "in the diffs of that page - is right, + is the mistake": (
        "在那一页的 diff 里，- 是正确的行，+ 是错误的行"
    ),
    "{steps} steps, {passes} passes over loaders, {calls} collectives": (
        "{steps} 个 step，{passes} 遍 DataLoader，{calls} 次集合通信"
    ),
    "looked at {count} processes, each: {seen}; {seconds:.0f} s": (
        "检查了 {count} 个进程，每个进程：{seen}；用了 {seconds:.0f} 秒"
    ),
    "looked at {count} processes, rank 0: {seen}; {seconds:.0f} s": (
        "检查了 {count} 个进程，其中 rank 0：{seen}；用了 {seconds:.0f} 秒"
    ),
    "one epoch was seen: give two, and the orders of their items are compared": (
        "只看到一个 epoch：给两个，就能比较它们的数据顺序"
    ),
    "no DataLoader was seen: the items of the processes were not compared": (
        "没有看到 DataLoader：没有比较各进程读的数据"
    ),
    # ---- launch.py, command.py, notebook.py, options.py
    "it had stood still for {seconds} s: see --patience": (
        "它已经 {seconds} 秒没有动静（参见 --patience）"
    ),
    "left out {count} lines of magics and shell, in cells {cells}": (
        "跳过了 {count} 行魔法命令和 shell 命令，在第 {cells} 个代码单元里"
    ),
    "there is nothing to put back": "没有需要恢复的文件",
    "started again": "再启动一次",
    "one process": "用一个进程",
    "three machines of a process each": "三个节点，每个一个进程",
    "not tried, for the run took {seconds:.0f} s: {what} (--budget)": (
        "第一次运行用了 {seconds:.0f} 秒，所以没有试：{what}（--budget）"
    ),
    "not started again: the script has removed its working folder": "没有再启动：脚本删掉了工作目录",
    "started again: it loaded a file": "再启动一次：加载了文件",
    "started again: it loaded a file; {why}": "再启动一次：加载了文件；{why}",
    "started again: torch.load() was not called: it began anew": (
        "再启动一次：没有调用 torch.load()，从头开始了"
    ),
    "compared with one process: {here} steps here, {there} there": (
        "和单进程比较：这里每个进程 {here} 个 step，单进程时 {there} 个"
    ),
    "not compared with one process: the script starts its own": (
        "没有和单进程比较：脚本自己启动进程"
    ),
    "{steps} steps in each": "每个进程 {steps} 个 step",
    "{count} machines of a process each: {said}": "{count} 个节点，每个一个进程：{said}",
    "played {count} machines: the local ranks began at 0 on each": (
        "模拟了 {count} 个节点：每个节点上的 local rank 都从 0 开始"
    ),
    # ---- files/
    "{text}: {names}": "{text}：{names}",
    "{names} and {count} more": "{names}，另有 {count} 个",
    "put back as before this run": "已经恢复成这次运行之前的样子",
    "put back as before that run": "已经恢复成那次运行之前的样子",
    "removed, for it was new (--keep leaves it)": "新产生的，已经删掉（加 --keep 可以保留）",
    "left, for --keep was given": "加了 --keep，所以保留",
    "left in caches, so that nothing is downloaded again": "留在缓存里，免得重新下载",
    "left: {file}: {why}": "留下没动：{file}（{why}）",
    "{text}; the older one: {file}": "{text}；原来的在：{file}",
    "changed or new, by something that the doctor cannot see": "被医生看不到的程序改过或者新建",
    "of programs, only the files that their commands name are kept": (
        "对于这些程序，只能恢复命令里写明的文件"
    ),
    "too large to be copied, and written by a program: what was in them is lost": (
        "太大、没有复制，又被程序改写过，原来的内容已经丢失"
    ),
    "the doctor failed, and may have missed a file: {note}": (
        "医生自己出了错，可能漏掉了文件：{note}"
    ),
    "the doctor did not see the run write it": "医生没有看到这次运行写过它",
    "could not be removed: {error}": "删不掉：{error}",
    "could not be put back: {error}": "恢复不了：{error}",
    "somebody else wrote it during the run; before the run it was another": (
        "运行期间被别的程序写过；运行之前的是另一个文件"
    ),
    "somebody else wrote it since": "之后被别的程序写过",
    "somebody else wrote it since, or a program that did not say so": (
        "之后被别的程序写过，或被本次运行启动、但命令里没有写明这个文件的程序写过"
    ),
    "too many files to see what programs changed besides": ("文件太多，看不出程序还改动了哪些"),
    "what was kept of it is gone": "为它保留的副本已不存在",
    "more files than are kept for a program; what it did to the others stays": (
        "文件太多，没有为程序全部保留；它对其余文件的改动没有撤销"
    ),
    "its folder is a link now": "它所在的文件夹现在是一个链接",
    "something wrote into it that cannot be seen": "被医生看不到的程序写过",
    "it is a folder now, and not empty": "现在是文件夹，而且不是空的",
    "could not be ended: processes {pids}": "没法结束的进程：{pids}",
    "not all was put back: {error}; what is kept: {folder}": (
        "没有全部恢复：{error}；备份在：{folder}"
    ),
    "the doctor was killed by signal {number}": "医生被信号 {number} 强行结束",
    "a doctor on {host} was killed, it seems: --restore puts its files back "
    "there; what is kept: {folder}": (
        "{host} 上的医生好像被强行结束了：在那台机器上用 --restore 恢复它的文件；备份在：{folder}"
    ),
    "an earlier run of the doctor was killed": "医生之前的一次运行被强行结束",
    "another doctor is at work here: it puts back what both have touched": (
        "另一个医生正在这里工作：两者都碰过的文件由它恢复"
    ),
}
